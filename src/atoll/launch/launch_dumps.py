"""The structs of the launch state machine. See `atoll.state.object_dumps`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from atoll.cluster.lifecycle import Island
from atoll.cluster.locations import DeviceLocation
from atoll.cluster.processes.leases import Leases
from atoll.errors import Status
from atoll.ir.program import Program
from atoll.launch.compilation import Compilation
from atoll.launch.compile_watch import CompileWatch, WatchedCompilation
from atoll.launch.connections import Connections, Peer
from atoll.launch.control_flow_runs import ControlFlowRuns
from atoll.launch.delegated_run_records import DelegatedRun, Revocation
from atoll.launch.delegated_runs import DelegatedRuns
from atoll.launch.dependency_tracker import ClientRunLimits, DependencyTracker, Places
from atoll.launch.failing_launches import FailingLaunches
from atoll.launch.failures import Failures
from atoll.launch.function_releases import FunctionReleases
from atoll.launch.gang_charges import GangCharges
from atoll.launch.island_lines import IslandLines
from atoll.launch.large_launches import EndedLaunch, LargeLaunch, LargeLaunches
from atoll.launch.large_plans import LargePlans
from atoll.launch.launch_builder import LaunchBuilder
from atoll.launch.launches import Launches
from atoll.launch.long_gangs import LongGangs
from atoll.launch.lowerings import Lowering, Lowerings
from atoll.launch.memory_waits import MemoryWait, MemoryWaits
from atoll.launch.outbox import Frees, Outbox
from atoll.launch.registry import ProgramRegistry
from atoll.launch.reservations import Reservations
from atoll.launch.scheduler import Scheduler
from atoll.launch.sequential import SequentialDispatch
from atoll.launch.uncompiled_programs import UncompiledProgram, UncompiledPrograms
from atoll.launch.worlds import World, Worlds, WorldState
from atoll.protocol import messages as m
from atoll.protocol.forwarding import RelayTable
from atoll.state.delegated_parts import DelegatedProgram, IslandPart, PartMemory, PartResult, Transfers
from atoll.state.gang_specs import GangSpec
from atoll.state.host_window import HostWindow
from atoll.state.memory_quotas import MemoryQuota
from atoll.state.object_dumps import AnyRef, As, Callback, CountsOf, Deque, Dump, Ref, Shared, callback, dump_of
from atoll.state.programs import HostPlan
from atoll.state.queued_nodes import Dependency, Gang, QueuedNode
from atoll.state.session import ControlFlowRun, Launch, Session
from atoll.state.stepped_work import Bug
from atoll.state.stored_forms import DurationsOf, GroupsOf, Key, Requirement, RunGangsForm, TurnsOf, Units
from atoll.state.tallies import Tally
from atoll.state.tenants import Tenant

# ---- lines


@dump_of(IslandLines, "island lines", version=3, rebuilt={"known_loads": dict, "loads_version": int})
class IslandLinesDump(Dump):
    record: Ref[Island]
    policy: AnyRef
    window: int
    most_busy_ns: int
    hosts: int
    loads: GroupsOf[int, HostWindow]
    full_hosts: int = 0
    lines: dict[int, Deque[Ref[QueuedNode[Any]]]] = {}
    committed: Deque[Ref[Gang[Any]]] = []
    draining: bool = False
    in_flight: int = 0
    busy_ns: int = 0
    unbounded: int = 0
    started: int = 0
    delegated: dict[int, int] = {}
    newest: int = 0
    exclusive_since: float = float("-inf")
    launch_ns: int = 0
    records: list[Ref[Island]] = []
    places: dict[int, tuple[int, ...]] = {}
    patience: int = 1
    passed: int = 0


@dump_of(Scheduler, "scheduler", version=2)
class SchedulerDump(Dump):
    _islands: list[Ref[IslandLines[Any]]]
    _started: dict[int, int] = {}
    _deferred: dict[int, Ref[QueuedNode[Any]]] = {}
    _barred: dict[int, dict[Ref[QueuedNode[Any]], None]] = {}
    now: float = 0.0
    touched: set[int] = set()
    contended: set[int] = set()


@dump_of(SequentialDispatch, "sequential dispatch")
class SequentialDispatchDump(Dump):
    _current: dict[int, Ref[QueuedNode[Any]]] = {}
    _next: dict[int, Deque[Ref[QueuedNode[Any]]]] = {}
    _unacknowledged: dict[int, int] = {}
    _unstarted: dict[int, int] = {}
    _joined: int = 0


# ---- dependencies and control flow


@dump_of(Places, "places")
class PlacesDump(Dump):
    _most_of_a_session: int
    _most_of_an_island: int
    _of_session: CountsOf[int] = {}
    _of_island: CountsOf[int] = {}


@dump_of(ClientRunLimits, "client run limits")
class ClientRunLimitsDump(Dump):
    _all: Ref[Places[Any]]
    _in_xla: Ref[Places[Any]]
    _admitted: dict[Ref[Dependency[Any]], None] = {}
    _waiting: list[Ref[Dependency[Any]]] = []
    _alone: set[str] = set()


@dump_of(DependencyTracker, "dependencies")
class DependencyTrackerDump(Dump):
    _client_runs: Ref[ClientRunLimits[Any]]
    _unresolved: CountsOf[int] = {}
    _last_python: dict[int, Ref[Dependency[Any]]] = {}


@dump_of(ControlFlowRuns, "control flow runs")
class ControlFlowRunsDump(Dump):
    _next_handle: int
    _awaited: dict[Key, Ref[ControlFlowRun]] = {}
    _ended: dict[Key, None] = {}


# ---- memory


def _quota(name: str) -> MemoryQuota | None:
    return MemoryQuota(name) if name else None


@dump_of(MemoryWait, "memory wait", version=2)
class MemoryWaitDump(Dump):
    node: Ref[QueuedNode[Any]]
    gang: Ref[Gang[Any]]
    device: tuple[int, int]
    nbytes: int
    quota: Annotated[str, As(_quota, read=lambda quota: quota or "")] = ""
    passed_ns: int = 0
    is_offered: bool = False
    asked: dict[int, int] = {}
    sought: float = 0.0
    last_since: float = -1.0


@dump_of(MemoryWaits, "memory waits")
class MemoryWaitsDump(Dump):
    waiting: dict[Ref[QueuedNode[Any]], Ref[MemoryWait]] = {}


@dump_of(Reservations, "reservations")
class ReservationsDump(Dump):
    """Reservations have no state of their own."""


# ---- launches


@dump_of(Launches, "launcher", rebuild=lambda launches: launches.left_out.find())
class LaunchesDump(Dump):
    in_flight: dict[int, Ref[Gang[Any]]] = {}


@dump_of(FailingLaunches, "failing launches")
class FailingLaunchesDump(Dump):
    """Failing launches have no state of their own. Remains refer to them."""


@dump_of(GangCharges, "gang charges", version=2)
class GangChargesDump(Dump):
    tallies: dict[tuple[int, str], Ref[Tally]] = {}
    joint: dict[tuple[tuple[int, ...], str], Ref[Tally]] = {}


class StoredWorld(msgspec.Struct, omit_defaults=True):
    """A world, with its functions in an order, so that equal states have equal dumps."""

    number: int
    tenant: str
    islands: tuple[int, ...]
    hosts: tuple[int, ...]
    state: WorldState
    functions: list[str] = []


def _world(stored: StoredWorld) -> World:
    return World(stored.number, stored.tenant, stored.islands, stored.hosts, stored.state, set(stored.functions))


def _stored_world(world: World) -> StoredWorld:
    functions = sorted(world.functions)
    return StoredWorld(world.number, world.tenant, world.islands, world.hosts, world.state, functions)


WorldForm = Annotated[StoredWorld, As(_world, read=_stored_world)]


@dump_of(Worlds, "worlds", version=5, oldest=5)
class WorldsDump(Dump):
    _next: int
    _worlds: dict[tuple[str, tuple[int, ...]], WorldForm] = {}
    _left: dict[int, Status | None] = {}


@dump_of(LaunchBuilder, "launch builder")
class LaunchBuilderDump(Dump):
    _next_sequence: int
    _next_feed: int


@dump_of(LargeLaunch, "beginning launch")
class LargeLaunchDump(Dump):
    session: Ref[Session]
    launch: Ref[Launch]
    message: m.Launch
    values: int = 0
    units: Units | None = None
    joined: int | None = None


@dump_of(EndedLaunch, "ended launch")
class EndedLaunchDump(Dump):
    launch: Ref[Launch]
    values: int = 0


@dump_of(LargeLaunches, "large launches")
class LargeLaunchesDump(Dump):
    _beginning: TurnsOf[Ref[LargeLaunch]]
    _ended: TurnsOf[Ref[EndedLaunch]]


@dump_of(LargePlans, "large plans")
class LargePlansDump(Dump):
    _missing: dict[int, set[int]] = {}
    _held: dict[int, dict[Ref[QueuedNode[Any]], None]] = {}


@dump_of(LongGangs, "long gangs")
class LongGangsDump(Dump):
    _heads: set[tuple[int, tuple[int, int]]] = set()
    _known: set[int] = set()
    _last: float = 0.0


@dump_of(Failures, "failures")
class FailuresDump(Dump):
    _failed_for: DurationsOf[int]


# ---- delegated runs


@dump_of(IslandPart, "island part")
class IslandPartDump(Dump):
    each: Shared[RunGangsForm]
    whole: Ref[GangSpec]
    successor: Ref[GangSpec]
    memory: PartMemory
    results: tuple[Annotated[tuple[int, Requirement, int], As(PartResult, True)], ...]
    lost: tuple[int, ...]
    devices: tuple[int, ...] | None
    transfers: tuple[Transfers, ...]
    written: tuple[int, ...]
    samples: dict[int, int]
    sample_places: tuple[int, ...]


@dump_of(DelegatedProgram, "delegated program")
class DelegatedProgramDump(Dump):
    parts: dict[int, Ref[IslandPart]]
    nodes: tuple[tuple[tuple[int, int], ...], ...]
    gangs: int
    ahead: int
    weight: int


@dump_of(DelegatedRun, "delegated run")
class DelegatedRunDump(Dump):
    launch: Ref[Launch]
    program: Ref[DelegatedProgram]
    first: int
    gangs: dict[int, Ref[Gang[Any]]]
    ending: int
    limits: dict[int, int] | None = None
    exclusive_ns: dict[int, int] = {}


@dump_of(Revocation, "revocation")
class RevocationDump(Dump):
    runs: list[Ref[DelegatedRun]]
    asked: set[int] = set()
    started: dict[int, int] = {}
    lost: dict[int, Status] = {}


@dump_of(DelegatedRuns, "delegated runs", rebuild=DelegatedRuns.index_runs)
class DelegatedRunsDump(Dump):
    _runs: dict[int, Ref[DelegatedRun]] = {}
    revocations: dict[int, Ref[Revocation]] = {}


# ---- functions and programs


@dump_of(Compilation, "compilation", version=3, oldest=3, rebuild=Compilation.place_functions)
class CompilationDump(Dump):
    _awaiting: dict[tuple[int, int, int], m.Compile] = {}
    _delayed: dict[tuple[int, int, int], tuple[float, m.Compile]] = {}


@dump_of(FunctionReleases, "function releases")
class FunctionReleasesDump(Dump):
    _deferred: set[int] = set()
    due: dict[int, None] = {}


@dump_of(CompileWatch, "compile watch")
class CompileWatchDump(Dump):
    _watched: dict[tuple[str, int], WatchedCompilation] = {}


@dump_of(Lowering, "lowering", rebuilt={"_steps": lambda: None})  # a loaded lowering repeats its steps
class LoweringDump(Dump):
    session: Ref[Session]
    number: int
    definition: Shared[Program]
    begin: Callback
    functions: tuple[str, ...] = ()
    done: int = 0


@dump_of(Lowerings, "lowerings", version=2)
class LoweringsDump(Dump):
    _turns: TurnsOf[Ref[Lowering]]
    failed: dict[int, Bug] = {}


@dump_of(UncompiledProgram, "uncompiled program")
class UncompiledProgramDump(Dump):
    session: Ref[Session]
    number: int
    definition: Shared[Program]
    functions: dict[int, str] = {}


@dump_of(UncompiledPrograms, "uncompiled programs")
class UncompiledProgramsDump(Dump):
    _programs: dict[int, dict[int, tuple[str, Ref[UncompiledProgram]]]] = {}
    _by_function: dict[str, dict[Key, None]] = {}


@dump_of(ProgramRegistry, "programs")
class ProgramRegistryDump(Dump):
    _next_plan: int
    _uncompiled: Ref[UncompiledPrograms]
    plans: dict[int, dict[int, Ref[HostPlan]]] = {}


# ---- connections and messages


@dump_of(Peer, "peer")
class PeerDump(Dump):
    connection: int
    secret: str
    handlers: Annotated[str, As(str, read=lambda handlers: handlers.speaks)]
    hello: m.Hello | None = None
    number: int = 0
    role: str = ""
    address: str = ""
    tenant: Ref[Tenant] | None = None
    leases: Ref[Leases] | None = None


@dump_of(Connections, "connections", version=3)
class ConnectionsDump(Dump):
    peers: dict[int, Ref[Peer]] = {}
    hosts: dict[int, int] = {}
    sessions: dict[int, int] = {}
    engine: int | None = None
    away: set[int] = set()
    spare_engine: int | None = None
    relays: dict[str, int] = {}


def _relays(relays: dict[int, int]) -> RelayTable:
    made = RelayTable()
    for host, relay in relays.items():
        made.form((host,), relay)
    return made


def _update_relays(table: RelayTable, made: RelayTable) -> None:
    table._relays.clear()
    table._relays.update(made._relays)
    table._in_processes = made._in_processes
    table._known.clear()


if TYPE_CHECKING:
    RelaysForm = RelayTable
else:
    RelaysForm = Annotated[dict[int, int], As(_relays, read=lambda table: table._relays, update=_update_relays)]


@dump_of(Frees, "frees")
class FreesDump(Dump):
    _frees: dict[tuple[int, bool], dict[tuple[int, ...], list[int]]] = {}


@dump_of(Outbox, "outbox")
class OutboxDump(Dump):
    """The outbox between two turns, when it has no actions."""

    _frees: Ref[Frees]
    _relays: RelaysForm
    cause: int = 0
    seconds: float = 0.0
    _credits: dict[int, int] = {}
    _due: dict[int, None] = {}


callback(
    "programs: lower",
    ProgramRegistry,
    ProgramRegistry._steps,
    int,
    Ref[Session],
    Shared[Program],
    dict[int, DeviceLocation],
    dict[int, str],
    bool,
)
callback("compilation: drop reference", Compilation, Compilation.drop_reference)
callback("programs: drop remaining", ProgramRegistry, ProgramRegistry._drop_remaining)
callback("launcher: end dropped", Launches, Launches.end_dropped)
callback("failing launches: end dropped", FailingLaunches, FailingLaunches.end_dropped)
callback("reservations: release", Reservations, Reservations.release)
