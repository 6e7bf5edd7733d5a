"""A session as the controller keeps it: one client connection and all it owns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from atoll.cluster.virtual_devices import SessionDevices
from atoll.errors import Status
from atoll.ir.program import Program
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Directory, Entry
from atoll.state.gang_states import Waited
from atoll.state.gangs import GangSpec, HostFeeds
from atoll.state.memory_ledger import Block
from atoll.state.programs import ProgramParts, RegisteredProgram
from atoll.state.queued_nodes import NOBODY, Dependency, QueuedNode
from atoll.state.tallies import ROW_TRANSFERS, Tally
from atoll.state.tenants import Tenant

Key = tuple[int, int]  # host and feed
Waiter = TypeVar("Waiter")


@dataclass
class Feeds(Generic[Waiter]):
    """The bytes that a session's client sends to hosts, by host and feed. Workers report each that has arrived."""

    early: set[Key] = field(default_factory=set)  # arrived before the launch that needs them
    awaited: dict[Key, Waiter] = field(default_factory=dict)  # by what awaits them
    unwanted: set[Key] = field(default_factory=set)  # to be dropped when they arrive

    def claim(self, key: Key) -> bool:
        """Take a feed that has arrived early. Return whether it has."""
        if key in self.early:
            self.early.discard(key)
            return True
        return False

    def claim_unwanted(self, key: Key) -> bool:
        """Whether the feed that has just arrived was refused before."""
        if key in self.unwanted:
            self.unwanted.discard(key)
            return True
        return False

    def refuse(self, key: Key) -> bool:
        """No launch will take it. True where it has arrived, and is to be dropped now; else it is when it arrives."""
        if self.claim(key):
            return True
        self.awaited.pop(key, None)
        self.unwanted.add(key)
        return False

    def lose(self, hosts: set[int]) -> None:
        """Forget what was sent to these hosts."""
        for feeds in (self.early, self.unwanted):
            feeds.difference_update([key for key in feeds if key[0] in hosts])

    def lost(self, hosts: set[int], resent: Iterable[Key], unsent: Iterable[int]) -> list[tuple[Key, Waiter]]:
        """Return the feeds that launches await of these hosts and that are lost.

        The client's proxy sends the feeds in `resent` to the restarted hosts, and those in `unsent` sooner or later.
        """
        coming, later = {key for key in resent if key[0] in hosts}, set(unsent)
        self.unwanted = {key for key in self.unwanted if key[0] not in hosts or key in coming or key[1] in later}
        self.unwanted.update(key for key in coming if key not in self.awaited and key not in self.early)
        return [
            (key, waiter)
            for key, waiter in self.awaited.items()
            if key[0] in hosts and key not in coming and key[1] not in later
        ]


@dataclass(slots=True, eq=False)
class Launch:
    """One run of a program. `entries` has the buffer of each of its values, also of those between its nodes.

    `hosts_started` are the hosts that know of it, with the sequence number of the first gang there; `pending` counts
    the gangs that have not ended.
    """

    session: int
    program: RegisteredProgram
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    feeds: tuple[int, ...]  # the client's
    host_feeds: int  # number of the first one between hosts
    entries: list[Entry]
    nodes: list[QueuedNode[GangRun]] = field(default_factory=list)
    hosts_started: dict[int, int] = field(default_factory=dict)
    pending: int = 0
    error: Status | None = None
    credits: int = 1  # of its session's window
    dependency: Dependency[GangRun] | None = None  # of its results
    part_of: ControlFlowRun | None = None  # the launch of a control flow node
    seconds: float = 0.0  # when it came, by the controller's clock
    is_delegated: bool = False  # of what it makes, only results have their entries: see `delegated_runs`
    then: Callable[[Launch], None] | None = None  # called at its end, where the controller itself has launched it
    handles: tuple[int, ...] = field(init=False)  # of arguments and results

    def __post_init__(self) -> None:
        self.handles = self.arguments + self.results

    def named_entries(self) -> Iterator[tuple[int, Entry]]:
        """Return the buffers that have a handle, with it."""
        program = self.program
        yield from zip(self.arguments, self.entries, strict=False)
        for value in program.result_values:
            yield self.results[program.values[value - program.arguments].result], self.entries[value]

    def moved_by(self, spec: GangSpec) -> int:
        """The bytes that a gang of it moves: of what it makes, or else of what it reads."""
        made = [self.entries[each.value].nbytes for each in spec.makes]
        read = (self.entries[each].nbytes for each in spec.handles if each < len(self.arguments))
        return sum(made) or sum(read)


@dataclass(slots=True, eq=False)
class ControlFlowRun:
    """One launch of a control flow node. `parts` are the node's programs. See `launch.control_flow_runs`."""

    session: int
    node: m.RegisterSwitch | m.RegisterLoop
    parts: tuple[RegisteredProgram, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    dependency: Dependency[GangRun]
    age: int  # of its nodes
    traceback_id: int
    credits: int
    carried: tuple[int, ...] = ()  # by a loop
    awaited: tuple[int, int] = (0, 0)  # the host that is to report, and its gang, by sequence
    is_over: bool = False  # its last part has been launched, or it has failed


# A buffer that is written to the memory of a donated one: (the buffer, the donor, its block).
Inherited = tuple[Entry, Entry, Block]


@dataclass(slots=True, eq=False)
class GangRun:
    """One execution of a program's gang: the payload of the scheduler's `Gang`."""

    launch: Launch
    spec: GangSpec
    hosts_left: set[int]  # that have not ended their parts
    failure: Status | None = None  # on some of several hosts
    left_out: tuple[int, ...] = ()  # hosts of a collective that start no other until it has ended on all
    duration: int = 0  # in nanoseconds, of the slowest host
    device_ns: int = 0  # that it kept its devices busy, summed over these
    advance_ns: int = 0  # of that, charged while it ran: see `launch.long_gangs`
    blocks: list[Block] = field(default_factory=list)  # that it holds while it runs
    inherited: Sequence[Inherited] = ()  # until it has ended
    waited: Waited = ()  # before it was started
    tally: Tally | None = None  # where it counts, from its start on
    rows: dict[int, tuple[int, int]] | None = None  # by host: bytes of rows sent, and received

    def note_rows(self, host: int, sent: int, received: int) -> None:
        """A host has moved so many bytes of rows, beside those that it has before."""
        if self.rows is None:
            self.rows = {}
        before = self.rows.get(host, (0, 0))
        self.rows[host] = before[0] + sent, before[1] + received

    @property
    def received(self) -> int:
        """Bytes of rows, on all its hosts."""
        return sum([received for _, received in self.rows.values()]) if self.rows else 0

    def moved(self, hosts: tuple[int, ...]) -> int:
        """The bytes that it moves, all of it; of rows, those that these hosts received, or else sent."""
        if self.spec.kind not in ROW_TRANSFERS:
            return self.launch.moved_by(self.spec)
        which = self.spec.kind == "receive rows"
        return sum([self.rows[host][which] for host in hosts if host in self.rows]) if self.rows else 0

    def incoming(self) -> Iterator[HostFeeds]:
        """What its hosts get from others, by the numbers of this launch."""
        first = self.launch.host_feeds
        for host, feeds in self.spec.incoming:
            yield HostFeeds(host, tuple([(first + number, count) for number, count in feeds]))


@dataclass
class Session:
    """One client connection and all it owns."""

    number: int
    pid: int
    label: str
    secret: str
    devices: SessionDevices
    platform: str = ""  # of the devices
    tenant: Tenant = NOBODY
    pings: int = 0  # that its proxy was sent
    pongs: int = 0  # that it has answered
    directory: Directory = field(default_factory=Directory)
    programs: dict[int, RegisteredProgram | Status] = field(default_factory=dict)  # or why it cannot be lowered
    parts: dict[int, ProgramParts] = field(default_factory=dict)  # of programs that have not come completely
    costs: dict[int, int] = field(default_factory=dict)  # credits that a launch takes, of programs that take several
    control_flow: dict[int, m.RegisterSwitch | m.RegisterLoop] = field(default_factory=dict)  # nodes, by number
    functions: dict[int, str] = field(default_factory=dict)
    # Functions that are being compiled for where the session migrates to: their names there.
    migrating: dict[int, str] = field(default_factory=dict)
    migration_failure: Status | None = None  # why one of them could not be compiled
    # As they came, for migrations.
    definitions: dict[int, Program] = field(default_factory=dict)  # of programs
    called: dict[int, tuple[int, ...]] = field(default_factory=dict)  # functions, by each program that is large
    function_requests: dict[int, m.RegisterFunction] = field(default_factory=dict)  # for functions
    feeds: Feeds[QueuedNode[GangRun]] = field(default_factory=Feeds)  # that its client sends
    # By island: functions that its hosts have yet to compile again.
    needs_recompile: dict[int, set[str]] = field(default_factory=dict)
    # By island: the reason of each failure of it that the proxy has not acknowledged.
    unacknowledged_failures: dict[int, list[Status]] = field(default_factory=dict)
    in_steps: int = 0  # programs of it that are being lowered, and launches that are put in line, in steps
    in_flight: int = 0
    credits: int = 0  # of its window, that these have taken
    launches: int = 0
    python_gangs: set[int] = field(default_factory=set)  # those that call Python and have not started, by sequence
    # Functions that are released once all such gangs up to a sequence number have started: (the number, the function).
    deferred_releases: deque[tuple[int, int]] = field(default_factory=deque)
    waits_for_islands: bool = True  # that are lost, until they are back; else what needs one fails
    leaves_islands: bool = False  # by itself, when they are drained
    has_errors: bool = False  # some buffer of it stands for an error
    has_spilled: bool = False  # some buffer of it may be spilled
    suspended: str = ""  # how far its suspension has come, in a few words; "" where it runs

    def launched(self) -> None:
        """One launch more is in flight."""
        self.launches += 1
        self.in_flight += 1
        self.tenant.launched()

    def launch_ended(self, credits: int) -> None:
        self.in_flight -= 1
        self.credits -= credits
        self.tenant.ended(1)

    @property
    def name(self) -> str:
        """What operators read."""
        return f"session {self.number} ({self.label or self.pid})"
