"""The structs of migrations, suspensions and spilled arrays. See `atoll.state.object_dumps`."""

from __future__ import annotations

from atoll.cluster.locations import DeviceLocation
from atoll.errors import Status
from atoll.ir.types import ArraySpec
from atoll.launch.launches import Launches
from atoll.launch.outbox import Outbox
from atoll.migration import suspensions
from atoll.migration.array_spiller import ArraySpiller, _Restore, _Save, _Spill
from atoll.migration.internal_programs import InternalPrograms
from atoll.migration.memory_pressure import MemoryPressure, _Eviction
from atoll.migration.migrations import Migration, Migrations, MigrationState
from atoll.migration.movers import CopyingMover, RestoringMover
from atoll.migration.rules import MemoryNeed
from atoll.migration.suspensions import Suspension, Suspensions, _Resumption
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Entry, SpilledArray, SpilledPart
from atoll.state.object_dumps import AnyRef, Callback, CountsOf, Dump, Ref, Shared, callback, dump_of
from atoll.state.session import Launch, Session
from atoll.state.session_states import SessionState
from atoll.state.stored_forms import DurationsOf, Key


@dump_of(InternalPrograms, "internal programs", version=2)
class InternalProgramsDump(Dump):
    _next: int = -1


# ---- spilled arrays


@dump_of(_Spill, "spill", version=2)
class SpillDump(Dump):
    session: Ref[Session]
    arrays: dict[int, tuple[Ref[Entry], tuple[SpilledPart, ...]]]
    views: dict[int, tuple[Key, ...]]
    left: set[int]
    then: Callback
    pieces: dict[int, m.SpilledPiece] = {}
    failure: Status | None = None
    directory: str = ""
    undivided: list[int] = []
    shards: dict[int, list[tuple[int, int, int]]] = {}
    copied: list[int] = []


@dump_of(_Save, "save")
class SaveDump(Dump):
    parts: dict[int, tuple[SpilledPart, ...]]
    left: set[int]
    then: Callback
    pieces: dict[int, m.SpilledPiece] = {}
    failure: Status | None = None


@dump_of(_Restore, "restore")
class RestoreDump(Dump):
    session: Ref[Session]
    handle: int
    entry: Ref[Entry]
    spilled: SpilledArray
    then: Callback | None
    keeps: bool
    launch: Ref[Launch] | None = None


@dump_of(ArraySpiller, "array spiller", version=6)
class ArraySpillerDump(Dump):
    _next_request: int
    next_piece: int
    _next_feed: int
    _spills: dict[int, Ref[_Spill]] = {}
    _saves: dict[int, Ref[_Save]] = {}
    _restores: dict[Key, Ref[_Restore]] = {}
    losses: CountsOf[int] = {}
    _by_feed: dict[Key, Ref[_Restore]] = {}
    _files: dict[int, dict[tuple[int, str], int]] = {}
    _left: dict[int, dict[str, None]] = {}
    working: dict[int, None] = {}


callback("array spiller: restored", ArraySpiller, ArraySpiller._restored, tuple[Ref[_Restore], ...], tuple[int, ...])

# ---- migrations


@dump_of(CopyingMover, "device copies", version=2)
class CopyingMoverDump(Dump):
    _internal: Ref[InternalPrograms]
    _launches: Ref[Launches]
    _out: Ref[Outbox]
    _next_handle: Callback
    _programs: dict[Shared[ArraySpec], int] = {}
    _copies: dict[int, int] = {}
    _kept: dict[int, Ref[Entry]] = {}
    _unsized: list[int] = []
    _needed: dict[tuple[int, int], int] = {}
    _left: list[int] = []
    _views: dict[Shared[ArraySpec], int] = {}


@dump_of(RestoringMover, "restoration", version=2)
class RestoringMoverDump(Dump):
    _spiller: Ref[ArraySpiller]
    _kept: dict[int, SpilledArray] = {}
    _left: set[int] = set()
    _losses: dict[int, int] = {}
    _failure: Status | None = None
    _next: list[int] = []


@dump_of(Migration, "migration", version=2)
class MigrationDump(Dump):
    number: int
    session: Ref[Session]
    plan: Callback
    then: Callback
    changes: dict[int, DeviceLocation]
    islands: set[int]
    mover: AnyRef
    state: MigrationState = MigrationState.QUIESCING
    functions: dict[int, str] = {}
    requests: list[int] = []
    programs: list[int] = []


@dump_of(Migrations, "migrations", version=2)
class MigrationsDump(Dump):
    _next_handle: int
    _next_number: int
    _states: DurationsOf[tuple[int, MigrationState]]
    under_way: dict[int, Ref[Migration]] = {}
    working: dict[int, None] = {}


callback("migrations: next handle", Migrations, Migrations._handle)
callback("restoration: restored", RestoringMover, RestoringMover._restored)

# ---- suspensions


@dump_of(_Resumption, "resumption")
class ResumptionDump(Dump):
    islands: tuple[int, ...]
    seconds: float
    then: Callback
    since: float | None = None


@dump_of(Suspension, "suspension")
class SuspensionDump(Dump):
    number: int
    session: Ref[Session]
    then: Callback
    by_system: bool = False
    need: MemoryNeed = MemoryNeed()
    resumption: Ref[_Resumption] | None = None


@dump_of(Suspensions, "suspensions")
class SuspensionsDump(Dump):
    _states: DurationsOf[tuple[int, SessionState]]
    by_session: dict[int, Ref[Suspension]] = {}
    _now: float = 0.0


callback("suspensions: spilled", Suspensions, Suspensions._spilled, Ref[Suspension])
callback("suspensions: plan", Suspensions, Suspensions._plan, Ref[Session], tuple[int, ...])
callback("suspensions: resumed", Suspensions, Suspensions._resumed, Ref[Suspension])
callback("suspensions: ignore", None, suspensions._ignore)

# ---- memory pressure


@dump_of(_Eviction, "eviction")
class EvictionDump(Dump):
    left: set[int]
    then: Callback


@dump_of(MemoryPressure, "memory pressure", version=2)
class MemoryPressureDump(Dump):
    _spilling: dict[Key, Ref[Entry]] = {}
    _stuck: dict[Key, float] = {}
    _refused: dict[int, float] = {}
    _searched_until: float = 0.0


callback("memory pressure: spilled", MemoryPressure, MemoryPressure._spilled, int, list[int])
callback("memory pressure: suspended", MemoryPressure, MemoryPressure._suspended, int, Ref[_Eviction] | None)
