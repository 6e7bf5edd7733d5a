"""The structs of the controller, and how to dump it and load it. See `atoll.state.object_dumps`.

The constructor of the controller makes the parts and connects them. A dump has the state of the parts.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

import msgspec

import atoll.launch.launch_dumps
import atoll.migration.migration_dumps
import atoll.state.state_dumps
import atoll.telemetry.telemetry_dumps  # noqa: F401
from atoll._version import __version__
from atoll.cluster.locations import DeviceLocation, HostDevice
from atoll.cluster.settings import ClusterSettings
from atoll.cluster.slice_placement import IslandDevices
from atoll.controller.admission import Admission
from atoll.controller.core import Controller
from atoll.controller.islands.engine_requests import Agents
from atoll.controller.islands.engine_role import EngineRole
from atoll.controller.islands.island_recovery import IslandRecovery, _AtLoss
from atoll.controller.islands.overruns import Overruns, _Closed
from atoll.controller.islands.relay_groups import Relays
from atoll.controller.islands.waiting_calls import WaitingCalls
from atoll.controller.named_arrays.array_copies import ArrayCopies, CopyRun
from atoll.controller.named_arrays.array_files import ArrayFiles, ArrayWrite, Restoration
from atoll.controller.named_arrays.published_arrays import Publication, PublishedArrays
from atoll.controller.named_arrays.read_programs import ReadProgram
from atoll.controller.named_arrays.vaults import Vaults
from atoll.controller.named_arrays.version_reads import Part, TreeKey, VersionRead, VersionReads
from atoll.controller.named_arrays.version_relief import Place, Search, VersionRelief
from atoll.controller.operators import drains
from atoll.controller.operators.drains import Drains, _Drain
from atoll.controller.operators.requests import Operators, _Start
from atoll.controller.operators.service import WaitingRequests
from atoll.controller.session_persistence import SessionPersistence
from atoll.controller.sessions.detached_sessions import DetachedSessions
from atoll.controller.sessions.inboxes import Inboxes
from atoll.controller.sessions.name_waits import NameWaits
from atoll.controller.sessions.proxy_requests import SliceRequests
from atoll.controller.sessions.queries import Queries
from atoll.controller.sessions.sessions import Sessions
from atoll.controller.state import ClusterState
from atoll.controller.watchdog import Watchdog
from atoll.decodable import decodable
from atoll.errors import JournalError, Status
from atoll.ir.types import ArraySpec
from atoll.journal.event_log import EventLog
from atoll.journal.stored_settings import StoredSettings
from atoll.launch.connections import Peer
from atoll.migration.persisted_arrays import StoredArray
from atoll.named_arrays.named_arrays import NamedArrays, VersionWait
from atoll.named_arrays.transfer_trees import TransferTree
from atoll.named_arrays.version_files import FileState, VersionFiles
from atoll.named_arrays.version_records import Name, PublishedArray, Version, VersionIndex
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import messages as m
from atoll.security.tokens import Guesses
from atoll.state.buffer_directory import NO_ENTRY
from atoll.state.object_dumps import (
    As,
    Callback,
    CountsOf,
    Deque,
    Dump,
    Ref,
    callback,
    decode,
    dump,
    dump_of,
    load,
)
from atoll.state.offenses import Running
from atoll.state.queued_nodes import Dependency
from atoll.state.session import Session
from atoll.state.stepped_work import Bug
from atoll.state.stored_forms import DurationsOf, Key, TurnsOf
from atoll.state.tenants import Tenant

_NO_TURNS: Any = ([], {})  # the stored form of empty `Turns`


@dump_of(EventLog, "event log")
class EventLogDump(Dump):
    """The number of events so far. The log of a loaded controller begins at the dump."""

    _count: int = 0


# ---- peers


def _restore_handlers(admission: Admission) -> None:
    """Give the peers their handlers, which are stored by name."""
    admission.restore_handlers({peer: str(peer.handlers) for peer in admission._peers.values()})


@dump_of(Admission, "admission", version=4, rebuild=_restore_handlers)
class AdmissionDump(Dump):
    _guesses: Ref[Guesses]
    _next_timer: int
    _waiting: list[Ref[Peer]] = []
    _timers: dict[int, Callback] = {}


callback("admission: expect introduction", Admission, Admission._expect_introduction, int)
callback("admission: fail absent worker", Admission, Admission._fail_absent_worker, int, str)
callback("admission: fail without relay", Admission, Admission._fail_without_relay, int, str)


@dump_of(EngineRole, "engine role")
class EngineRoleDump(Dump):
    _lost_at: float | None = None


@dump_of(NameWaits, "name waits", version=2)
class NameWaitsDump(Dump):
    _until: dict[int, float] = {}
    _told: set[int] = set()


@dump_of(Agents, "agents")
class AgentsDump(Dump):
    report: m.EngineReport
    _agents: set[int] = set()


# ---- sessions


@dump_of(Sessions, "sessions")
class SessionsDump(Dump):
    next_number: int


@dump_of(DetachedSessions, "detached sessions", version=2)
class DetachedSessionsDump(Dump):
    until: dict[int, float] = {}
    _awaiting: DurationsOf[int] = msgspec.field(default_factory=cast(Any, dict))


@dump_of(Inboxes, "inboxes", version=3)
class InboxesDump(Dump):
    _turns: TurnsOf[m.FromProxy]
    _nodes: CountsOf[int] = {}
    _credits: CountsOf[int] = {}
    _bytes: CountsOf[int] = {}
    _at_once: int = 0
    _cost: int = 0
    failed: dict[int, Bug] = {}


@dump_of(Queries, "queries", rebuilt={"_loads": dict}, rebuild=Queries.count_again)
class QueriesDump(Dump):
    _next: int
    _asked: dict[int, tuple[int, int, m.Query]] = {}


@dump_of(SessionPersistence, "session persistence")
class SessionPersistenceDump(Dump):
    _persist_none: bool = False
    _operators: list[int] = []


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


@dump_of(SliceRequests, "slice requests")
class SliceRequestsDump(Dump):
    """Slice requests have no state of their own."""


callback("slice requests: add again", SliceRequests, SliceRequests._add_again, Ref[Session], m.AddSlice)

# ---- islands


@dump_of(Relays, "relays")
class RelaysDump(Dump):
    broken: dict[int, str] = {}
    _islands: set[int] = set()


RunningForm = Annotated[tuple[Ref[Tenant], bool], As(Running, True)]
AtLossForm = Annotated[tuple[dict[str, RunningForm], dict[str, int]], As(_AtLoss, True)]


@dump_of(IslandRecovery, "recovery", version=4)
class IslandRecoveryDump(Dump):
    _broken_for: DurationsOf[int]
    _hanging: DurationsOf[int]
    _restarting: DurationsOf[int]
    _divided: dict[tuple[str, str], float] = {}
    _silent_pairs: dict[Key, float] = {}
    _at_loss: dict[int, AtLossForm] = {}
    _charged: set[int] = set()


@dump_of(Overruns, "overruns")
class OverrunsDump(Dump):
    _abandoned: DurationsOf[int]
    _busy: dict[int, m.Pong] = {}
    _running: dict[int, float] = {}
    _stopped: dict[int, tuple[float, str]] = {}
    _closed: dict[int, _Closed] = {}


@dump_of(WaitingCalls, "waiting calls")
class WaitingCallsDump(Dump):
    _waiting: DurationsOf[int]
    _ended: set[int] = set()


@dump_of(Watchdog, "watchdog")
class WatchdogDump(Dump):
    _durations: DurationsOf[tuple[str | int, ...]]
    _reported: set[tuple[str | int, ...]] = set()
    _next: float = 0.0


# ---- operators


@dump_of(_Drain, "drain", version=2)
class DrainDump(Dump):
    operator: int
    island: int
    left: set[int] = set()
    leaving: set[int] = set()
    returns: bool = False
    problems: list[str] = []
    copies_since: float = 0.0


@dump_of(Drains, "drains", version=2)
class DrainsDump(Dump):
    _end_times: DurationsOf[int]
    _leave_times: DurationsOf[int]
    _ending: dict[int, Ref[_Drain]] = {}
    _leaving: dict[int, Ref[_Drain]] = {}
    _copying: dict[int, Ref[_Drain]] = {}


callback("drains: moved", None, drains._moved, Ref[Session], IslandDevices, IslandDevices)
callback("drains: when moved", Drains, Drains._when_moved, Ref[_Drain], int)


@dump_of(Operators, "operators")
class OperatorsDump(Dump):
    _start_times: DurationsOf[int]
    _refused: str = ""
    _starting: dict[int, _Start] = {}


callback(
    "operators: remapped",
    Operators,
    Operators._remapped,
    Ref[Session],
    m.RemapRequest,
    tuple[DeviceLocation, ...],
)
callback("operators: when remapped", Operators, Operators._when_remapped, int, Ref[Session], m.RemapRequest)
callback("operators: when suspended", Operators, Operators._when_suspended, int, Ref[Session])
callback("operators: when resumed", Operators, Operators._when_resumed, int, Ref[Session])


@dump_of(WaitingRequests, "waiting requests", version=2)
class WaitingRequestsDump(Dump):
    _turns: TurnsOf[m.FromOperator]
    failed: dict[int, Bug] = {}


# ---- the controller


@dump_of(ClusterState, "cluster state")
class ClusterStateDump(Dump):
    sessions: dict[int, Ref[Session]] = {}


class ControllerDump(msgspec.Struct, frozen=True):
    """A controller: the arguments of its constructor, and the state of its parts."""

    settings: ClusterSettings
    token: str
    host_token: str
    objects: Any  # `Objects`


class _StoredController(ControllerDump, frozen=True, kw_only=True):
    settings: StoredSettings
    objects: msgspec.Raw


def dump_controller(controller: Controller) -> ControllerDump:
    """Return the state of a controller between two turns. Encode it before the controller handles another event."""
    tokens = controller.tokens
    return ControllerDump(controller.settings, tokens.client, tokens.host, dump(_roots(controller)))


def load_controller(content: bytes | msgspec.Raw, version: str = __version__) -> Controller:
    """Return the controller whose dump was encoded. Raises JournalError if this version cannot read or continue it."""
    try:
        found = msgspec.msgpack.decode(content, type=decodable(_StoredController))
    except msgspec.MsgspecError as error:
        raise JournalError(f"the dump of a controller cannot be read: {error}") from None
    controller = Controller(found.settings.current(), found.token, version, found.host_token)
    load(decode(found.objects), _roots(controller))
    return controller


def _roots(controller: Controller) -> dict[str, Any]:
    return {**controller.parts(), "no entry": NO_ENTRY}
