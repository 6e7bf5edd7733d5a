"""The structs of the controller's records, and of the parts of `atoll.cluster` that it keeps.

A struct lists the attributes of a class that are stored, in the form in which they are stored. `dump_of` registers it,
and `object_dumps` reads and sets the attributes. The annotation of a field says how its value is stored:

- a plain type, such as `int` or `tuple[str, ...]`: unchanged
- `Ref[Entry]`: the number of an object that has a struct itself, so that the loaded objects refer to each other again
- `Shared[ArraySpec]`: the number of an immutable value that many objects share, which is stored once
- `Callback`: the name of a method that `callback` declares, with its object and arguments
- `Deque`, `CountsOf`: a list and a dict that become a `deque` and a `Counter`
- `Annotated[form, As(make)]`: a stored form from which `make` makes the value (`stored_forms`)

If you change a struct, follow "Change a stored struct" in CONTRIBUTING.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any
from weakref import WeakValueDictionary

import msgspec

from atoll.cluster.lifecycle import Island, IslandState
from atoll.cluster.locations import DeviceLocation
from atoll.cluster.named_runs import UNNAMED, NamedRun
from atoll.cluster.processes.leases import Leases
from atoll.cluster.resources import Host, ResourceManager
from atoll.cluster.slice_placement import Slices
from atoll.cluster.tenant_settings import TenantSettings
from atoll.cluster.topology import Topology
from atoll.cluster.usage.usage_records import Estimate
from atoll.cluster.virtual_devices import SessionDevices, Slice, VirtualDevice
from atoll.decodable import decodable
from atoll.errors import Status
from atoll.ir import plan as p
from atoll.ir.program import Node, Program
from atoll.ir.types import ArraySpec
from atoll.ir.validation import DefinitionCheck
from atoll.protocol import messages as m
from atoll.security.tokens import Guesses
from atoll.state.buffer_blocks import BufferBlocks
from atoll.state.buffer_directory import BufferDirectory, Entry, SpilledArray, _Wait
from atoll.state.buffer_states import BufferState, HandleState
from atoll.state.compiled_functions import FunctionRegistry, FunctionReport, Registration
from atoll.state.delegated_parts import NotDelegated
from atoll.state.device_clocks import DeviceClocks, _Clocks, _Host
from atoll.state.dispatch_units import UnitBuilder, _Forming
from atoll.state.estimates import Estimates
from atoll.state.gang_specs import ClientFeed, DurationEstimate, GangSpec, HostFeeds
from atoll.state.gang_states import GangState, Reason
from atoll.state.launch_states import LaunchState
from atoll.state.memory_ledger import Block, BlockGroup, BlockSpan, MemoryLedger, _Memory
from atoll.state.object_dumps import As, Callback, CountsOf, Deque, Dump, Ref, RefTo, Shared, callback, dump_of
from atoll.state.offenses import Offenses, TenantOffenses
from atoll.state.programs import HostPlan, ProgramParts, ProgramValue, RegisteredProgram
from atoll.state.quarantine import Quarantine
from atoll.state.queued_nodes import Dependency, Dropped, Gang, HostCallKind, QueuedNode
from atoll.state.rates import Bucket, Rates, TenantRates
from atoll.state.session import ControlFlowRun, Feeds, GangRun, Launch, Session
from atoll.state.session_states import SessionState
from atoll.state.stepped_work import Remains, _Part
from atoll.state.stored_forms import GroupsOf, Hosts, Key, Made, Requirement, TurnsOf, Units
from atoll.state.tallies import Histogram, Tally
from atoll.state.tenants import Tenant, Tenants
from atoll.state.usage import Account, Meter

# ---- the cluster's devices, tenants and usage


@dump_of(Island, "island")
class IslandDump(Dump):
    number: int
    state: IslandState = IslandState.STARTING
    restarts: int = 0
    last_failure: Status | None = None
    was_ready: bool = False
    incarnation: int = 0
    machines: tuple[str, ...] = ()
    returns: bool = False
    needs_recompile: dict[int, set[str]] = {}


@dump_of(ResourceManager, "resources")
class ResourcesDump(Dump):
    topology: Topology
    hosts: dict[int, Host] = {}
    islands: dict[int, Ref[Island]] = {}
    _was_complete: bool = False


@dump_of(Leases, "leases")
class LeasesDump(Dump):
    _renewed: dict[int, float] = {}
    _looked: float = 0.0


@dump_of(Slices, "slices")
class SlicesDump(Dump):
    sessions: dict[int, Ref[SessionDevices]] = {}


callback("slices: closed", Slices, Slices.closed, int)


@dump_of(SessionDevices, "session devices")
class SessionDevicesDump(Dump):
    virtual: Shared[tuple[VirtualDevice, ...]]
    locations: dict[int, DeviceLocation]
    initial_locations: dict[int, DeviceLocation]
    closed: Callback
    slices: dict[int, Slice] = {}
    used: set[int] = set()
    next_slice: int = 1
    shares: bool = False
    are_free: bool = False


@dump_of(Guesses, "guesses")
class GuessesDump(Dump):
    _spent: dict[str, tuple[float, float]] = {}


@dump_of(Tenant, "tenant", version=3)
class TenantDump(Dump):
    settings: Shared[TenantSettings]
    sessions: int = 0
    launches: int = 0
    running: int = 0
    memory: Ref[MemoryLedger] | None = None
    is_one_of_several: bool = False
    rejected_publications: int = 0
    refusals: dict[str, int] = {}


@dump_of(Tenants, "tenants")
class TenantsDump(Dump):
    by_name: dict[str, Ref[Tenant]]
    are_told_apart: bool = False


@dump_of(Bucket, "bucket")
class BucketDump(Dump):
    rate: float
    seconds: float
    level: float
    time: float = 0.0


@dump_of(Rates, "rates")
class RatesDump(Dump):
    tenant: Ref[Tenant]
    tenants: Ref[Tenants]
    settings: Shared[TenantSettings]
    launches: Ref[Bucket]
    uploads: Ref[Bucket]
    compiles: Ref[Bucket]
    delayed: Deque[Ref[QueuedNode[Any]]] = []


@dump_of(TenantRates, "tenant rates")
class TenantRatesDump(Dump):
    _by_name: dict[str, Ref[Rates]] = {}
    delayed: dict[str, Ref[Rates]] = {}


@dump_of(Offenses, "offenses")
class OffensesDump(Dump):
    _crashes: Deque[tuple[float, float]] = []
    _suspensions: int = 0
    until: float = 0.0


@dump_of(TenantOffenses, "tenant offenses")
class TenantOffensesDump(Dump):
    _runs: dict[str, Ref[Offenses]] = {}
    _compiles: dict[str, Ref[Offenses]] = {}
    _messages: dict[str, Ref[Offenses]] = {}


@dump_of(Quarantine, "quarantine")
class QuarantineDump(Dump):
    suspects: set[str] = set()
    refused: dict[str, Status] = {}
    _compiling: set[str] = set()


def _no_accounts(sessions: list[int]) -> dict[int, WeakValueDictionary[str, Account]]:
    return {session: WeakValueDictionary() for session in sessions}


@dump_of(Meter, "meter")
class MeterDump(Dump):
    """The meter, with the sessions that have accounts. The accounts are those to which other objects refer."""

    now: float = 0.0
    _accounts: Annotated[list[int], As(_no_accounts, read=list)] = []
    _active: dict[Ref[Account], None] = {}
    _taken: float = -1.0


def _add_account(account: Account) -> None:
    """Add an account to the meter, unless its session has ended."""
    of_session = account._meter._accounts.get(account.session)
    if of_session is not None:
        of_session[account.program] = account


@dump_of(Account, "account", rebuild=_add_account)
class AccountDump(Dump):
    _meter: Ref[Meter]
    tenant: str = ""
    session: int = 0
    label: str = ""
    program: str = ""
    is_idle: bool = True
    device_ns: int = 0
    bytes_moved: int = 0
    compile_seconds: float = 0.0
    nbytes: int = 0
    _byte_seconds: float = 0.0


@dump_of(Histogram, "histogram")
class HistogramDump(Dump):
    counts: list[int]
    total: float = 0.0


@dump_of(Tally, "tally")
class TallyDump(Dump):
    waited: Ref[Histogram]
    ran: Ref[Histogram]
    device_ns: int = 0
    failed: int = 0
    moved: dict[str, list[int]] = {}


@dump_of(DeviceClocks, "device clocks")
class DeviceClocksDump(Dump):
    _hosts: Annotated[dict[int, _Host], As(_Clocks.of, read=_Clocks.stored)] = {}


# ---- memory and buffers


@dump_of(MemoryLedger, "memory ledger", rebuilt={"_known": dict, "_version": int})
class MemoryLedgerDump(Dump):
    _groups: GroupsOf[tuple[int, int], _Memory]
    capacity: dict[tuple[int, int], int] = {}
    total: int = 0
    is_tight: bool = False
    _unpublished_bytes: int = 0


@dump_of(BlockGroup, "block group")
class BlockGroupDump(Dump):
    requirement: Requirement
    count: int


@dump_of(Block, "block", version=3)
class BlockDump(Dump):
    requirement: Requirement
    users: int = 1
    owner: Ref[MemoryLedger] | None = None
    account: Ref[Account] | None = None
    views: int = 0
    is_published: bool = False
    group: Ref[BlockGroup] | None = None
    span: Shared[BlockSpan] | None = None
    parts: tuple[Ref[Block], ...] = ()


BlocksForm = Annotated[tuple[Ref[Block], ...], As(BufferBlocks.fromkeys, read=tuple)]


@dump_of(Entry, "buffer")
class EntryDump(Dump):
    hosts: Hosts
    nbytes: int
    state: BufferState = BufferState.PENDING
    error: Status | None = None
    handle: HandleState = HandleState.USABLE
    released: bool = False
    uses: int = 0
    waits: list[int] | None = None
    blocks: BlocksForm = ()
    producer: str = ""
    traceback_id: int = 0
    spec: Shared[ArraySpec] | None = None
    dependency: Ref[Dependency[Any]] | None = None
    readers: list[Ref[Dependency[Any]]] | None = None
    spilled: SpilledArray | None = None
    is_published: bool = False


@dump_of(BufferDirectory, "directory", version=2, oldest=2)
class DirectoryDump(Dump):
    entries: dict[int, Ref[Entry]] = {}
    waits: dict[int, _Wait] = {}
    nbytes: int = 0
    awaited: int = 0


# ---- functions and programs


@dump_of(Registration, "registration", version=2)
class RegistrationDump(Dump):
    session: int
    function: int
    name: str
    pending: set[int] = set()
    failure: Status | None = None
    info: bytes = b""
    is_repeated: bool = False


@dump_of(
    FunctionRegistry,
    "functions",
    version=2,
    rebuilt={"_pending": dict},
    rebuild=FunctionRegistry.count_pending,
)
class FunctionsDump(Dump):
    users: dict[str, int] = {}
    locations: dict[str, tuple[tuple[DeviceLocation, ...], ...]] = {}
    contents: dict[str, str] = {}
    reports: dict[str, FunctionReport] = {}
    waiting: dict[tuple[str, int], list[Ref[Registration]]] = {}
    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0


class PlanForm(msgspec.Struct, frozen=True, array_like=True):
    """A plan. `is_encoded` says whether a loaded program keeps it encoded."""

    is_encoded: bool
    content: msgspec.Raw


def _read_plan(plan: p.Plan | msgspec.Raw) -> PlanForm:
    if isinstance(plan, msgspec.Raw):
        return PlanForm(True, plan)
    return PlanForm(False, msgspec.Raw(msgspec.msgpack.encode(plan)))


def _plan(form: PlanForm) -> p.Plan | msgspec.Raw:
    content = msgspec.Raw(bytes(form.content))  # a copy, since it would keep the whole dump alive
    return content if form.is_encoded else msgspec.msgpack.decode(content, type=decodable(p.Plan))


@dump_of(HostPlan, "host plan")
class HostPlanDump(Dump):
    plan: Annotated[PlanForm, As(_plan, read=_read_plan)]
    arguments: tuple[int, ...] = ()
    results: tuple[int, ...] = ()


@dump_of(DurationEstimate, "duration estimate")
class DurationEstimateDump(Dump):
    nanoseconds: int
    runs: int = 0


@dump_of(
    GangSpec,
    "gang spec",
    version=4,
    rebuilt={"_memory": lambda: None, "_island_of": dict, "_spans": dict},  # computed when they are needed
    rebuild=GangSpec.__post_init__,
)
class GangSpecDump(Dump):
    island: int
    hosts: Hosts
    kind: str
    duration_estimate: Ref[DurationEstimate]
    scratch: Requirement
    functions: tuple[str, ...] = ()
    awaited: tuple[ClientFeed, ...] = ()
    incoming: tuple[HostFeeds, ...] = ()
    handles: tuple[int, ...] = ()
    makes: tuple[Made, ...] = ()
    consumes: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    collective: bool = False
    devices: dict[int, tuple[int, ...]] = {}
    segments: int = 1
    host_call: HostCallKind | None = None
    moved: int = 0
    title: str = ""
    is_apart: bool = False
    stream: int | None = None
    islands: tuple[int, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    parts: tuple[Ref[GangSpec], ...] = ()
    nodes: tuple[Ref[GangSpec], ...] = ()


@dump_of(_Forming, "forming units")
class FormingDump(Dump):
    units: list[tuple[Ref[GangSpec], ...]]
    _nodes: Units
    _before: Units
    _node: int = 0
    _unit: int = 0
    _open: list[Ref[GangSpec]] = []


@dump_of(UnitBuilder, "unit builder")
class UnitBuilderDump(Dump):
    _nodes: Units
    _joined: Units
    _launches: int
    _next_look: int
    _forming: Ref[_Forming] | None = None


@dump_of(RegisteredProgram, "program", rebuilt={"_by_plan": dict, "_by_handles": dict})
class RegisteredProgramDump(Dump):
    name: str
    number: int
    arguments: int
    results: int
    feeds: int
    host_feeds: int
    nodes: Units
    plans: dict[int, Ref[HostPlan]]
    values: tuple[ProgramValue, ...]
    result_specs: tuple[Shared[ArraySpec] | None, ...]
    donated: frozenset[int]
    functions: tuple[str, ...]
    islands: tuple[int, ...]
    units: Ref[UnitBuilder]
    is_unbounded: bool
    account: Ref[Account]
    waiting: int = 0
    released: bool = False
    is_large: bool = False
    reports: int = 0
    fed: frozenset[int] = frozenset()
    argument_memory: tuple[Requirement, ...] = ()
    result_values: tuple[int, ...] = ()
    inner_values: tuple[int, ...] = ()
    delegated: Annotated[int, RefTo("delegated program")] | NotDelegated = NotDelegated.UNKNOWN


@dump_of(DefinitionCheck, "definition check", rebuilt={"_devices": tuple})
class DefinitionCheckDump(Dump):
    name: str
    feeds: int = 0
    nodes: int = 0
    defined: int = 0
    _edges: int = 0
    _shards: int = 0


@dump_of(ProgramParts, "program parts")
class ProgramPartsDump(Dump):
    name: str
    arguments: tuple[ArraySpec, ...]
    feeds: int
    check: Ref[DefinitionCheck]
    nodes: list[Node] = []
    called: dict[int, None] = {}


@dump_of(Estimates, "estimates")
class EstimatesDump(Dump):
    _known: dict[str, Estimate] = {}
    _keys: dict[int, dict[str, int]] = {}
    _live: dict[str, Ref[DurationEstimate]] = {}
    _users: CountsOf[str] = {}
    _saved: dict[str, int] = {}
    _next_save: float = 0.0


# ---- sessions, launches and gangs


@dump_of(Dependency, "dependency")
class DependencyDump(Dump):
    session: int
    nodes: tuple[Ref[QueuedNode[Any]], ...]
    host_call: HostCallKind | None = None
    alone: frozenset[str] = frozenset()
    has_thread: bool = False
    awaited: int = 0
    is_enqueued: bool = False
    is_resolved: bool = False
    on_enqueued: list[Ref[Dependency[Any]]] = []
    on_resolved: list[Ref[Dependency[Any]]] = []


@dump_of(QueuedNode, "node", version=3)
class QueuedNodeDump(Dump):
    number: int
    session: int
    tenant: Ref[Tenant]
    missing: int = 0
    gangs: tuple[Ref[Gang[Any]], ...] = ()
    behind: int = 0
    is_delegated: bool = False
    dependency: Ref[Dependency[Any]] | None = None
    age: int = -1
    since: float = 0.0
    reason: Reason = Reason.ORDER
    lacks: Reason = Reason.BYTES
    waited: list[tuple[Reason, float]] | None = None
    committed_at: float = -1.0
    missing_by_kind: dict[Reason, int] | None = None
    starts_together: bool = False


@dump_of(Gang, "gang", version=2)
class GangDump(Dump):
    sequence: int
    island: int
    node: Ref[QueuedNode[Any]]
    run: Ref[GangRun]
    estimate: int
    hosts: Hosts
    exclusive: bool = False
    weight: int = 1
    devices: int = 1
    duration_source: Ref[GangSpec] | None = None
    charged: int = 0
    state: GangState = GangState.NEW
    started_at: float = -1.0
    islands: tuple[int, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    charges: dict[int, int] | None = None
    blocked_on: int = -1


@dump_of(GangRun, "gang run", version=2)
class GangRunDump(Dump):
    launch: Ref[Launch]
    spec: Ref[GangSpec]
    hosts_left: set[int] = set()
    failure: Status | None = None
    left_out: tuple[int, ...] = ()
    duration: int = 0
    device_ns: int = 0
    advance_ns: int = 0
    blocks: list[Ref[Block]] = []
    inherited: tuple[tuple[Ref[Entry], Ref[Entry], Ref[Block]], ...] = ()
    waited: tuple[tuple[Reason, float], ...] = ()
    tally: Ref[Tally] | None = None
    rows: dict[int, tuple[int, int]] | None = None
    overran: bool = False


@dump_of(Launch, "launch", version=2, rebuild=Launch.__post_init__)
class LaunchDump(Dump):
    session: int
    program: Ref[RegisteredProgram]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    feeds: tuple[int, ...]
    host_feeds: int
    entries: list[Ref[Entry]]
    nodes: list[Ref[QueuedNode[Any]]] = []
    hosts_started: dict[int, int] = {}
    pending: int = 0
    error: Status | None = None
    credits: int = 1
    dependency: Ref[Dependency[Any]] | None = None
    part_of: Ref[ControlFlowRun] | None = None
    seconds: float = 0.0
    state: LaunchState = LaunchState.ACTIVE
    then: Callback | None = None
    contents: bytes | None = None


@dump_of(ControlFlowRun, "control flow run")
class ControlFlowRunDump(Dump):
    session: int
    node: m.RegisterSwitch | m.RegisterLoop
    parts: tuple[Ref[RegisteredProgram], ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    dependency: Ref[Dependency[Any]]
    age: int
    traceback_id: int
    credits: int
    carried: tuple[int, ...] = ()
    awaited: tuple[int, int] = (0, 0)


@dump_of(Feeds, "feeds")
class FeedsDump(Dump):
    early: set[Key] = set()
    awaited: dict[Key, Ref[QueuedNode[Any]]] = {}
    unwanted: set[Key] = set()


def _restore_session(session: Session) -> None:
    """Count the functions, and let the checks of programs that have arrived in part use the session's devices again."""
    session.count_functions()
    for parts in session.parts.values():
        parts.check._devices = session.devices.locations


@dump_of(
    Session,
    "session",
    version=5,
    rebuilt={"function_uses": Counter, "functions_on": dict, "function_islands": dict},
    rebuild=_restore_session,
)
class SessionDump(Dump):
    number: int
    pid: int
    label: str
    secret: str
    devices: Ref[SessionDevices]
    tenant: Ref[Tenant]
    directory: Ref[BufferDirectory]
    feeds: Ref[Feeds[Any]]
    platform: str = ""
    pings: int = 0
    pongs: int = 0
    programs: dict[int, Ref[RegisteredProgram] | Status] = {}
    parts: dict[int, Ref[ProgramParts]] = {}
    costs: dict[int, int] = {}
    control_flow: dict[int, m.RegisterSwitch | m.RegisterLoop] = {}
    functions: dict[int, str] = {}
    migrating: dict[int, str] = {}
    migration_failure: Status | None = None
    definitions: dict[int, Shared[Program]] = {}
    called: dict[int, tuple[int, ...]] = {}
    function_requests: dict[int, m.RegisterFunction] = {}
    unacknowledged_failures: dict[int, list[Status]] = {}
    in_steps: int = 0
    in_flight: int = 0
    credits: int = 0
    launches: int = 0
    python_gangs: set[int] = set()
    deferred_releases: Deque[tuple[int, int]] = []
    waits_for_islands: bool = True
    leaves_islands: bool = False
    has_errors: bool = False
    last_error: str = ""
    has_spilled: bool = False
    state: SessionState = SessionState.RUNNING
    is_on_disk: bool = False
    waits_for: str = ""
    is_vault: bool = False
    error_bytes: int = 0
    publishing: int = 0
    reading: int = 0
    run: NamedRun = UNNAMED
    failed_functions: dict[str, Status] = {}


# ---- remains of closed sessions

DroppedForm = Annotated[tuple[Ref[QueuedNode[Any]], list[Ref[Gang[Any]]], bool], As(Dropped, True)]


def _read_part(part: _Part) -> tuple[Any, ...]:
    """Return the remains as (release, number per step, keys, items of each kind). All items are of one kind."""
    keys = list(part.items) if isinstance(part.items, dict) else None
    items = list(part.items.values()) if isinstance(part.items, dict) else list(part.items)
    kinds = (str, Entry, RegisteredProgram | Status, Dropped)
    return part.release, part.per_step, keys, *([each for each in items if isinstance(each, kind)] for kind in kinds)


def _part(
    release: Callable[[Any], None],
    per_step: int,
    keys: list[int] | None,
    names: list[str],
    entries: list[Entry],
    programs: list[RegisteredProgram | Status],
    dropped: list[Dropped[Any]],
) -> _Part:
    items: list[Any] = [*names, *entries, *programs, *dropped]
    return _Part(items if keys is None else dict(zip(keys, items, strict=True)), release, per_step)


PartForm = Annotated[
    tuple[
        Callback,
        int,
        list[int] | None,
        list[str],
        list[Ref[Entry]],
        list[Ref[RegisteredProgram] | Status],
        list[DroppedForm],
    ],
    As(_part, True, _read_part),
]


@dump_of(Remains, "remains")
class RemainsDump(Dump):
    _turns: TurnsOf[PartForm]
