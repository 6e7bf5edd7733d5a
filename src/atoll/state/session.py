"""The controller's records of a session, a client connection with everything that it owns, and of its launches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from atoll.cluster.named_runs import UNNAMED, NamedRun
from atoll.cluster.state_machine import StateMachine
from atoll.cluster.virtual_devices import SessionDevices
from atoll.errors import Status
from atoll.ir.program import Program
from atoll.protocol import messages as m
from atoll.state.buffer_directory import BufferDirectory, Entry
from atoll.state.gang_specs import GangSpec, HostFeeds
from atoll.state.gang_states import Waited
from atoll.state.launch_states import TRANSITIONS as LAUNCH_TRANSITIONS
from atoll.state.launch_states import LaunchState
from atoll.state.memory_ledger import Block
from atoll.state.programs import ProgramParts, RegisteredProgram
from atoll.state.queued_nodes import NOBODY, Dependency, QueuedNode
from atoll.state.session_states import TRANSITIONS as SESSION_TRANSITIONS
from atoll.state.session_states import SessionState
from atoll.state.tallies import ROW_TRANSFERS, Tally
from atoll.state.tenants import Tenant

MAX_ERROR = 300  # characters of a session's last error

Key = tuple[int, int]  # (host, feed)
Waiter = TypeVar("Waiter")


class Feeds(msgspec.Struct, Generic[Waiter]):
    """The feeds of a session's client: bytes that it sends to hosts. Workers report each feed that has arrived."""

    early: set[Key] = msgspec.field(default_factory=set)  # arrived before the launch that needs them
    awaited: dict[Key, Waiter] = msgspec.field(default_factory=dict)  # with the node that awaits them
    unwanted: set[Key] = msgspec.field(default_factory=set)  # to be dropped when they arrive

    def claim(self, key: Key) -> bool:
        """Take a feed if it has arrived early. Return whether it has."""
        if key in self.early:
            self.early.discard(key)
            return True
        return False

    def claim_unwanted(self, key: Key) -> bool:
        """Return whether a feed that has just arrived was refused before, and forget the refusal."""
        if key in self.unwanted:
            self.unwanted.discard(key)
            return True
        return False

    def refuse(self, key: Key) -> bool:
        """Refuse a feed that no launch will take. Return whether it has arrived, so that it must be dropped now."""
        if self.claim(key):
            return True
        self.awaited.pop(key, None)
        self.unwanted.add(key)
        return False

    def forget_unawaited(self, hosts: set[int]) -> None:
        """Forget the feeds that were sent to these hosts and that no launch awaits."""
        for feeds in (self.early, self.unwanted):
            feeds.difference_update([key for key in feeds if key[0] in hosts])

    def lost_on(self, hosts: set[int], resent: Iterable[Key], unsent: Iterable[int]) -> list[tuple[Key, Waiter]]:
        """Return the lost feeds of restarted hosts that launches await.

        Args:
          hosts: the restarted hosts.
          resent: feeds that the client's proxy sends to them again.
          unsent: feeds that the proxy has not sent yet, and will send.
        """
        coming, later = {key for key in resent if key[0] in hosts}, set(unsent)
        self.unwanted = {key for key in self.unwanted if key[0] not in hosts or key in coming or key[1] in later}
        self.unwanted.update(key for key in coming if key not in self.awaited and key not in self.early)
        return [
            (key, waiter)
            for key, waiter in self.awaited.items()
            if key[0] in hosts and key not in coming and key[1] not in later
        ]


class Launch(msgspec.Struct, StateMachine[LaunchState], eq=False):
    """One run of a program. `error` is the reason if it is FAILING, or has ended with an error.

    `launch.launch_builder.LaunchBuilder` makes it from the message `Launch` of `protocol.messages`.
    """

    transitions = LAUNCH_TRANSITIONS
    session: int
    program: RegisteredProgram
    arguments: tuple[int, ...]  # handles
    results: tuple[int, ...]  # handles
    feeds: tuple[int, ...]  # from the client
    host_feeds: int  # number of the first feed between hosts
    entries: list[Entry]  # the buffers of all values, including inner ones
    nodes: list[QueuedNode[GangRun]] = msgspec.field(default_factory=list)
    hosts_started: dict[int, int] = msgspec.field(default_factory=dict)  # sequence number of the first gang, by host
    pending: int = 0  # number of gangs that have not ended
    error: Status | None = None
    credits: int = 1  # taken from its session's window
    dependency: Dependency[GangRun] | None = None  # of its results
    part_of: ControlFlowRun | None = None  # the run of the control flow node that it belongs to
    seconds: float = 0.0  # arrival, by the controller's clock
    state: LaunchState = LaunchState.ACTIVE
    then: Callable[[Launch], None] | None = None  # called at the end of a launch that the controller itself made
    contents: bytes | None = None  # of the only feed, which is then not sent to the hosts
    handles: tuple[int, ...] = ()  # of arguments and results

    def __post_init__(self) -> None:
        self.handles = self.arguments + self.results

    def _described(self) -> str:
        return f"a launch of {self.program.name}"

    @property
    def is_delegated(self) -> bool:
        return self.state is LaunchState.DELEGATED

    def awaited_by(self, spec: GangSpec) -> Iterator[Key]:
        """Yield the feeds of the client that hosts await before a gang of this launch starts."""
        if self.contents is None:
            for host, feed in spec.awaited:
                yield host, self.feeds[feed]

    def named_entries(self) -> Iterator[tuple[int, Entry]]:
        """Yield the buffers that have handles, as (handle, entry)."""
        yield from zip(self.arguments, self.entries, strict=False)
        yield from self.named_results()

    def named_results(self) -> Iterator[tuple[int, Entry]]:
        """Yield the results, as (handle, entry)."""
        program = self.program
        for value in program.result_values:
            yield self.results[program.values[value - program.arguments].result], self.entries[value]

    def moved_by(self, spec: GangSpec) -> int:
        """Return the bytes that a gang moves: those of the values that it makes, otherwise those that it reads."""
        entries, arguments = self.entries, len(self.arguments)
        made = sum([entries[each.value].nbytes for each in spec.makes])
        return made or sum([entries[each].nbytes for each in spec.handles if each < arguments])


class ControlFlowRun(msgspec.Struct, eq=False):
    """One launch of a control flow node. See `launch.control_flow_runs`."""

    session: int
    node: m.RegisterSwitch | m.RegisterLoop
    parts: tuple[RegisteredProgram, ...]  # the programs of the node
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    dependency: Dependency[GangRun]
    age: int  # of its nodes
    traceback_id: int
    credits: int
    carried: tuple[int, ...] = ()  # handles that a loop carries
    awaited: tuple[int, int] = (0, 0)  # host whose report is awaited, and the sequence number of the gang


# A buffer that is written to the memory of a donated one: (buffer, donor, block of the donor).
Inherited = tuple[Entry, Entry, Block]


class GangRun(msgspec.Struct, eq=False):
    """One execution of a program's gang: the payload of the scheduler's `Gang`."""

    launch: Launch
    spec: GangSpec
    hosts_left: set[int]  # hosts that have not ended their parts
    failure: Status | None = None  # on one of several hosts
    # Hosts that failed in a collective or a call of Python, or left it out. They start no other one until it has ended
    # on all hosts.
    left_out: tuple[int, ...] = ()
    duration: int = 0  # on the slowest host, in nanoseconds
    device_ns: int = 0  # busy time, summed over its devices
    advance_ns: int = 0  # charged while it ran, and not yet in `device_ns`: see `launch.long_gangs`
    overran: bool = False  # it ran for too long, and had to be stopped
    blocks: list[Block] = msgspec.field(default_factory=list)  # held while it runs
    inherited: Sequence[Inherited] = ()  # until it has ended
    waited: Waited = ()  # reasons to wait before its start
    tally: Tally | None = None  # that counts it, from its start on
    rows: dict[int, tuple[int, int]] | None = None  # bytes of rows sent and received, by host

    @property
    def islands_left(self) -> list[int]:
        """Return the islands of hosts that have not ended their parts, or else the first island."""
        return self.spec.islands_of(self.hosts_left) or [self.spec.island]

    @property
    def islands_text(self) -> str:
        islands = self.islands_left
        return f"island {islands[0]}" if len(islands) == 1 else f"{len(islands)} islands"

    def note_rows(self, host: int, sent: int, received: int) -> None:
        """Add bytes of rows that a host has sent and received."""
        if self.rows is None:
            self.rows = {}
        before = self.rows.get(host, (0, 0))
        self.rows[host] = before[0] + sent, before[1] + received

    @property
    def received(self) -> int:
        """Return the bytes of rows that all hosts have received."""
        return sum([received for _, received in self.rows.values()]) if self.rows else 0

    def moved(self, hosts: tuple[int, ...]) -> int:
        """Return the bytes that the gang moves. For transfers of rows, count only those of the given hosts."""
        if self.spec.kind not in ROW_TRANSFERS:
            return self.launch.moved_by(self.spec)
        which = self.spec.kind == "receive rows"
        return sum([self.rows[host][which] for host in hosts if host in self.rows]) if self.rows else 0

    def incoming(self) -> Iterator[HostFeeds]:
        """Yield the data that each host receives from other hosts, by the feed numbers of this launch."""
        first = self.launch.host_feeds
        for host, feeds in self.spec.incoming:
            yield HostFeeds(host, tuple([(first + number, count) for number, count in feeds]))


@dataclass
class Session(StateMachine[SessionState]):
    """A client connection and everything that it owns."""

    transitions = SESSION_TRANSITIONS
    number: int
    pid: int
    label: str
    secret: str
    devices: SessionDevices
    platform: str = ""  # of the devices
    tenant: Tenant = NOBODY
    pings: int = 0  # number of pings that were sent to its proxy
    pongs: int = 0  # number of answers
    directory: BufferDirectory = field(default_factory=BufferDirectory)
    programs: dict[int, RegisteredProgram | Status] = field(default_factory=dict)  # or why lowering failed
    parts: dict[int, ProgramParts] = field(default_factory=dict)  # of programs that have not arrived completely
    costs: dict[int, int] = field(default_factory=dict)  # credits per launch, for programs that take more than one
    control_flow: dict[int, m.RegisterSwitch | m.RegisterLoop] = field(default_factory=dict)  # nodes, by number
    functions: dict[int, str] = field(default_factory=dict)  # names on workers; see `add_function`
    function_uses: Counter[str] = field(default_factory=Counter)  # how many numbers each of these names has
    functions_on: dict[tuple[int, ...], set[str]] = field(default_factory=dict)  # these names, by islands
    function_islands: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the islands of each of these names
    # Why functions that were compiled before could not be compiled again, by these names.
    failed_functions: dict[str, Status] = field(default_factory=dict)
    migrating: dict[int, str] = field(default_factory=dict)  # names of functions at the destination of a migration
    migration_failure: Status | None = None  # of the compilation of one of them
    # The next three are kept for migrations, as the client sent them.
    definitions: dict[int, Program] = field(default_factory=dict)
    called: dict[int, tuple[int, ...]] = field(default_factory=dict)  # functions of each large program
    function_requests: dict[int, m.RegisterFunction] = field(default_factory=dict)
    feeds: Feeds[QueuedNode[GangRun]] = field(default_factory=Feeds)
    # By island: the reasons of its failures that the proxy has not acknowledged. The island may work again already.
    # Until the acknowledgment, bytes that the client sent before the failure may be lost.
    unacknowledged_failures: dict[int, list[Status]] = field(default_factory=dict)
    in_steps: int = 0  # number of programs that are being lowered, and of large launches that are being put in line
    in_flight: int = 0  # number of launches
    credits: int = 0  # of its window, taken by launches in flight
    launches: int = 0  # number of all launches so far
    python_gangs: set[int] = field(default_factory=set)  # gangs that call Python and have not started, by sequence
    # Functions that are released once all Python gangs up to a sequence number have started: (number, function).
    deferred_releases: deque[tuple[int, int]] = field(default_factory=deque)
    waits_for_islands: bool = True  # launches wait for a failed island; if not set, they fail
    leaves_islands: bool = False  # the client leaves islands itself when they are drained
    has_errors: bool = False  # some buffer stands for an error
    error_bytes: int = 0  # of the errors that its client has made
    last_error: str = ""  # message of the last failed launch or lost array, shortened to `MAX_ERROR`
    has_spilled: bool = False  # some buffer may be spilled
    state: SessionState = SessionState.RUNNING
    is_on_disk: bool = False  # while it is suspended, its arrays are in files; otherwise, in the memory of hosts
    waits_for: str = ""  # space that it lacks, if it is WAITING
    is_vault: bool = False  # it has no client, and holds the published arrays of its tenant
    publishing: int = 0  # number of versions of arrays that it has published and that are not complete
    reading: int = 0  # number of its reads of versions of arrays that have not ended
    run: NamedRun = UNNAMED

    def _described(self) -> str:
        return f"session {self.number}"

    def failed_function(self, names: Iterable[str]) -> Status | None:
        """Return why the first of these functions that failed could not be compiled again, or None."""
        return next((self.failed_functions[name] for name in names if name in self.failed_functions), None)

    @property
    def is_suspended(self) -> bool:
        """Return whether the session is suspended, is being suspended, or is being resumed."""
        return self.state not in (SessionState.RUNNING, SessionState.DETACHED, SessionState.CLOSED)

    @property
    def has_client(self) -> bool:
        """Return whether the session belongs to a script that runs, as far as the controller knows."""
        return not self.is_vault and self.state is not SessionState.DETACHED

    @property
    def state_text(self) -> str:
        """Return the state in a few words, or "" if the session runs as usual."""
        return "detached" if self.state is SessionState.DETACHED else self.suspension_text

    @property
    def suspension_text(self) -> str:
        """Return the progress of the suspension, in a few words, or "" if the session is not suspended."""
        if not self.is_suspended:
            return ""
        if self.state is SessionState.RESUMING:
            return "being resumed"
        if self.state < SessionState.SUSPENDED:
            return "being suspended"
        text = f"suspended {'on disk' if self.is_on_disk else 'in memory'}"
        return text if self.state is SessionState.SUSPENDED else f"{text}, and waits for {self.waits_for}"

    def add_function(self, number: int, name: str, islands: tuple[int, ...]) -> None:
        """Give a function its name on workers, in place of the one that it had. Several functions may have one name.

        `islands` are those on which it runs, which follow from the name.
        """
        self.remove_function(number)
        self.functions[number] = name
        self.function_uses[name] += 1
        self.place_function(name, islands)

    def place_function(self, name: str, islands: tuple[int, ...]) -> None:
        """Note the islands of a function, which are not stored."""
        self.function_islands[name] = islands
        self.functions_on.setdefault(islands, set()).add(name)

    def remove_function(self, number: int) -> str | None:
        """Forget a function. Return its name on workers, or None if it does not exist."""
        name = self.functions.pop(number, None)
        if name is not None:
            self.function_uses[name] -= 1
            if not self.function_uses[name]:
                del self.function_uses[name]
                islands = self.function_islands.pop(name)
                self.functions_on[islands].discard(name)
                if not self.functions_on[islands]:
                    del self.functions_on[islands]
        return name

    def count_functions(self) -> None:
        """Count the numbers of each name, which is not stored."""
        self.function_uses.update(self.functions.values())

    def count_launch(self) -> None:
        """Count a launch that is in flight."""
        self.launches += 1
        self.in_flight += 1
        self.tenant.count_launch()

    def note_error(self, error: Status) -> None:
        """Note that a launch has failed, or that arrays are lost: some buffers stand for this error."""
        self.has_errors = True
        self.last_error = error.message[:MAX_ERROR]

    def launch_ended(self, credits: int) -> None:
        self.in_flight -= 1
        self.credits -= credits
        self.tenant.ended(1)

    @property
    def name(self) -> str:
        """Return the name of the session for operators."""
        if self.is_vault:
            return f"the published arrays of tenant {self.tenant.name}"
        return f"session {self.number} ({self.label or self.pid})"
