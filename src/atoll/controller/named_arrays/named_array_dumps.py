"""The structs of what handles named arrays. See `atoll.state.object_dumps`."""

from __future__ import annotations

from typing import Any

from atoll.cluster.locations import HostDevice
from atoll.controller.named_arrays.array_copies import ArrayCopies, CopyRun
from atoll.controller.named_arrays.array_files import ArrayFiles, ArrayWrite, Restoration
from atoll.controller.named_arrays.published_arrays import Publication, PublishedArrays
from atoll.controller.named_arrays.read_programs import ReadProgram
from atoll.controller.named_arrays.vaults import Vaults
from atoll.controller.named_arrays.version_reads import Part, TreeKey, VersionRead, VersionReads
from atoll.controller.named_arrays.version_relief import Place, Search, VersionRelief
from atoll.errors import Status
from atoll.ir.types import ArraySpec
from atoll.migration.persisted_arrays import StoredArray
from atoll.named_arrays.named_arrays import NamedArrays, VersionWait
from atoll.named_arrays.transfer_trees import TransferTree
from atoll.named_arrays.version_files import FileState, VersionFiles
from atoll.named_arrays.version_records import Name, PublishedArray, Version, VersionIndex
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import messages as m
from atoll.state.object_dumps import Deque, Dump, Ref, callback, dump_of
from atoll.state.queued_nodes import Dependency
from atoll.state.session import Session
from atoll.state.stored_forms import Key, TurnsOf

_NO_TURNS: Any = ([], {})  # the stored form of empty `Turns`


@dump_of(VersionFiles, "files of a version", version=3, oldest=2)
class VersionFilesDump(Dump):
    state: FileState = FileState.WRITING
    nbytes: int = 0
    excess: int = 0
    problem: str = ""
    failure: Status | None = None
    failed: float = 0.0
    expected: int = 0


@dump_of(Version, "version of arrays", version=5, oldest=3, rebuilt={"index": VersionIndex})
class ArraysVersionDump(Dump):
    tenant: str
    name: str
    number: int
    session: int
    handles: tuple[int, ...]
    paths: tuple[str, ...]
    structure: bytes
    keep: int
    seconds: float
    state: VersionState = VersionState.PENDING
    held: list[int] = []
    arrays: list[PublishedArray] = []
    replicas: int = 1
    copies: dict[int, tuple[int, ...]] = {}
    devices: dict[int, int] = {}
    problem: str = ""
    readers: set[int] = set()
    error: Status | None = None
    retired: float = 0.0
    lent: list[tuple[int, int]] = []
    sent: int = 0
    passed_on: int = 0
    files: Ref[VersionFiles] | None = None


@dump_of(Name, "name of arrays")
class ArraysNameDump(Dump):
    tenant: str
    name: str
    keep: int = 1
    next_number: int = 1
    versions: dict[int, Ref[Version]] = {}
    failure: tuple[int, Status] | None = None


@dump_of(
    NamedArrays,
    "named arrays",
    version=3,
    rebuilt={"index": VersionIndex, "_awaited": dict, "_waits_for": dict, "pending_of": dict},
    rebuild=NamedArrays.rebuild_index,
)
class NamedArraysDump(Dump):
    names: dict[tuple[str, str], Ref[Name]] = {}
    readers: dict[int, tuple[int, Ref[Version]]] = {}
    waits: dict[Key, VersionWait] = {}
    pending: dict[tuple[str, str, int], Ref[Version]] = {}
    _waits_of: dict[int, int] = {}
    _readers_of: dict[int, set[int]] = {}
    _arrays_of: dict[str, int] = {}
    _described_of: dict[str, int] = {}
    _next_reader: int = 1
    _guests: set[int] = set()
    first_number: int = 1
    _reading: dict[int, int] = {}
    _closing: set[int] = set()


@dump_of(Vaults, "vaults", version=2)
class VaultsDump(Dump):
    _next_handle: int
    _next_shared: int
    by_tenant: dict[str, int] = {}
    leaving: TurnsOf[tuple[list[int], list[tuple[int, int]]]] = _NO_TURNS
    _freed: int = 0


@dump_of(CopyRun, "run that copies arrays")
class CopyRunDump(Dump):
    key: tuple[str, str, int]
    vault: int
    results: dict[int, int] = {}
    following: int = 0


@dump_of(ArrayCopies, "array copies", version=4)
class ArrayCopiesDump(Dump):
    due: dict[tuple[str, str, int], int] = {}
    leaving: set[int] = set()
    _queues: dict[str, dict[tuple[str, str, int], None]] = {}
    _runs: dict[tuple[str, str, int], Ref[CopyRun]] = {}
    _retries: dict[tuple[str, str, int], float] = {}
    _delays: dict[tuple[str, str, int], float] = {}
    _awaited: dict[tuple[str, str, int], dict[HostDevice, int]] = {}


@dump_of(TransferTree, "transfer tree", version=2, oldest=2)
class TransferTreeDump(Dump):
    patience: float = 0.0
    sessions: dict[int, int] = {}
    reads_of: dict[int, int] = {}
    waiting: dict[int, None] = {}
    interrupted: dict[int, None] = {}
    line: dict[int, None] = {}
    others: dict[int, dict[int, None]] = {}
    near: dict[int, dict[int, None]] = {}
    running: dict[int, int] = {}
    beside: set[int] = set()
    copies: dict[int, frozenset[int]] = {}
    fed: dict[int, int] = {}
    changed: float = 0.0
    stalled: float = 0.0
    rounds: int = 0
    extra: int = 0
    due: set[int] = set()


@dump_of(VersionRead, "read of a version", version=3, oldest=3)
class VersionReadDump(Dump):
    number: int
    session: int
    reader: int
    version: Ref[Version]
    part: Part
    targets: tuple[ArraySpec, ...]
    results: tuple[int, ...]
    dependency: Ref[Dependency[Any]]
    islands: tuple[int, ...]
    near: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    senders: tuple[int, ...] = ()
    attempts: int = 0
    is_interrupted: bool = False


@dump_of(
    VersionReads,
    "reads of versions",
    version=6,
    rebuilt={"_reads_of": dict, "_copies_of": dict, "_reads_from": dict},
    rebuild=VersionReads.rebuild_tables,
)
class VersionReadsDump(Dump):
    _next: int
    starts: TurnsOf[TreeKey] = _NO_TURNS
    ends: TurnsOf[tuple[int, Status | None]] = _NO_TURNS
    begun: Deque[int] = []
    leaving: Deque[int] = []
    programs: dict[int, list[ReadProgram]] = {}
    _reads: dict[int, Ref[VersionRead]] = {}
    _others: dict[tuple[tuple[str, str, int], str], dict[Part, None]] = {}
    _blocked: dict[TreeKey, None] = {}
    _received: dict[int, Ref[VersionRead]] = {}
    _trees: dict[tuple[str, str, int], dict[Part, Ref[TransferTree]]] = {}


callback("reads of versions: note end", VersionReads, VersionReads._note_end, int)


@dump_of(ArrayWrite, "write of arrays")
class ArrayWriteDump(Dump):
    key: tuple[str, str, int]
    number: int
    handles: tuple[int, ...]
    stored: tuple[tuple[ArraySpec, str], ...]


@dump_of(Restoration, "restoration of arrays", version=2, oldest=2)
class ArrayRestorationDump(Dump):
    key: tuple[str, str, int]
    vault: int
    places: dict[int, int]
    islands: set[int]
    order: list[int]
    held: list[int] = []
    left: set[int] = set()


@dump_of(ArrayFiles, "array files", version=2)
class ArrayFilesDump(Dump):
    due: dict[tuple[str, str, int], None] = {}
    lineage: str = ""
    _stored: dict[tuple[str, str, int], list[StoredArray]] = {}
    _directories: dict[tuple[str, str, int], list[int]] = {}
    _bytes: dict[str, int] = {}
    _queues: dict[str, dict[tuple[str, str, int], None]] = {}
    _writing: dict[str, tuple[str, str, int]] = {}
    _writes: dict[tuple[str, str, int], Ref[ArrayWrite]] = {}
    _lacking: dict[str, dict[tuple[str, str, int], float]] = {}
    _relieved: set[str] = set()
    _waiting: dict[tuple[str, str, int], None] = {}
    _restorations: dict[tuple[str, str, int], Ref[Restoration]] = {}


callback("array files: written", ArrayFiles, ArrayFiles._written, Ref[ArrayWrite])
callback("array files: restored", ArrayFiles, ArrayFiles._restored, Ref[Restoration])


@dump_of(VersionRelief, "version relief", version=3)
class VersionReliefDump(Dump):
    _last: dict[Place, Search] = {}


@dump_of(Publication, "publication")
class PublicationDump(Dump):
    session: Ref[Session]
    message: m.Publish
    checked: int = 0
    nbytes: int = 0
    version: Ref[Version] | None = None
    marked: int = 0


@dump_of(PublishedArrays, "published arrays", version=5)
class PublishedArraysDump(Dump):
    more: dict[tuple[str, str, int], None] = {}
    due: dict[int, None] = {}
    replies: Deque[tuple[int, int, int]] = []
    _begun: TurnsOf[Ref[Publication]] = _NO_TURNS
