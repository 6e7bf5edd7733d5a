"""The nodes of launches that wait in line, and their gangs. See `gang_states` for the states of a gang."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from atoll.cluster.state_machine import StateMachine
from atoll.cluster.tenant_settings import DEFAULT_TENANT
from atoll.state.gang_states import TRANSITIONS, GangState, Reason, Waited
from atoll.state.tenants import Tenant

# The scheduler never reads the payload of a gang.
Payload = TypeVar("Payload")

# Duration estimate of a gang that has not run yet: a few of them stay in flight, whatever their real duration is.
UNKNOWN_NS = 200_000

# Number of reasons to wait that a queued node records; the last one also stands for those that follow.
MAX_REASONS = 16

# The tenant of nodes in virtual time and in tests.
NOBODY = Tenant(DEFAULT_TENANT)


class QueuedNode(msgspec.Struct, Generic[Payload], eq=False):
    """A node of a launch that waits in line.

    `age` orders it in the lines of its session. It equals `number`, unless the node became known after later launches.
    """

    number: int
    session: int
    missing: int = 0  # number of missing inputs, such as bytes from the client
    tenant: Tenant = NOBODY
    gangs: tuple[Gang[Payload], ...] = ()
    behind: int = 0  # number of lines in which it is not at the head
    is_delegated: bool = False  # it stands for its whole launch: see `delegated_runs`
    starts_together: bool = False  # its gangs start in one step, since their islands communicate
    dependency: Dependency[Payload] | None = None
    age: int = -1
    since: float = 0.0  # when it began to wait for `reason`, by the controller's clock
    reason: Reason = Reason.ORDER
    lacks: Reason = Reason.BYTES  # kind of the missing inputs; of several kinds, the last one that was noted
    missing_by_kind: dict[Reason, int] | None = None  # the missing inputs, in order, if they are of several kinds
    waited: list[tuple[Reason, float]] | None = None  # earlier reasons to wait, with seconds
    committed_at: float = -1.0  # by the controller's clock

    def __post_init__(self) -> None:
        if self.age < 0:
            self.age = self.number

    @property
    def is_pending(self) -> bool:
        """Return whether the node is neither committed nor dropped, so that its gangs may still get their positions."""
        gangs = self.gangs
        return bool(gangs) and gangs[0].state < GangState.COMMITTED

    @property
    def is_in_line(self) -> bool:
        """Return whether the node is in the lines of its session."""
        return bool(self.gangs) and GangState.WAITING <= self.gangs[0].state <= GangState.READY

    @property
    def islands(self) -> tuple[int, ...]:
        """Return the islands of its gangs."""
        gangs = self.gangs
        return gangs[0].all_islands if len(gangs) == 1 else tuple([each for gang in gangs for each in gang.all_islands])

    @property
    def committed(self) -> bool:
        """Return whether the gangs got their positions in the order. Some may have ended since. For policies."""
        return any(GangState.COMMITTED <= gang.state <= GangState.FAILED for gang in self.gangs)

    @property
    def dropped(self) -> bool:
        """Return whether all gangs were dropped, so that the node never starts. For policies."""
        return all(gang.state is GangState.DROPPED for gang in self.gangs)

    def enter(self, state: GangState) -> None:
        """Change the state of all gangs."""
        for gang in self.gangs:
            gang.enter(state)

    def end(self) -> None:
        """Drop the references to the gangs, none of which will start. A dropped node may still be in line.

        Without this call, the gangs, their launch and this node stay alive until the garbage collector runs.
        """
        self.gangs = ()

    def note_missing(self, kind: Reason) -> None:
        """Note that one more input is missing."""
        if self.missing_by_kind is not None or (self.missing > 0 and kind is not self.lacks):
            counts = self.missing_by_kind or {self.lacks: self.missing}
            counts[kind] = counts.pop(kind, 0) + 1
            self.missing_by_kind = counts
        self.missing += 1
        self.lacks = kind

    def note_arrived(self, kind: Reason) -> None:
        """Note that a missing input has arrived. `lacks` is then a kind that is still missing, if any is."""
        self.missing -= 1
        counts = self.missing_by_kind
        if counts is None:
            return
        left = counts.pop(kind) - 1
        if left:
            counts[kind] = left
            return
        self.lacks = next(reversed(counts))
        if len(counts) == 1:
            self.missing_by_kind = None

    def wait_for(self, reason: Reason, now: float) -> None:
        """Change the reason for which the node waits."""
        if now > self.since:
            if self.waited is None:
                self.waited = []
            if len(self.waited) < MAX_REASONS:
                self.waited.append((self.reason, now - self.since))
            else:
                last, seconds = self.waited[-1]
                self.waited[-1] = (last, seconds + now - self.since)
        self.since, self.reason = now, reason

    def waited_until(self, now: float) -> Waited:
        """Return the reasons for which the node has waited since its launch, with seconds."""
        if now <= self.since:
            return () if self.waited is None else tuple(self.waited)
        return (*(self.waited or ()), (self.reason, now - self.since))


class HasDuration(Protocol):
    """An object that estimates the duration of gangs that do the same."""

    @property
    def expected(self) -> int:
        """Return for how many nanoseconds the next gang is expected to keep its devices busy."""


class HostCallKind(enum.Enum):
    """The Python that a gang of unbounded duration calls."""

    PYTHON = "python"  # colocated Python on the gang's host
    CLIENT = "client"  # the client's Python, called by a compiled function


@dataclass(slots=True, eq=False)
class Dependency(Generic[Payload]):
    """Nodes of one launch on which other launches may depend. See `launch.dependency_tracker`."""

    session: int
    nodes: tuple[QueuedNode[Payload], ...]  # empty once it is resolved, since arrays outlive their producers
    host_call: HostCallKind | None
    alone: frozenset[str] = frozenset()  # functions of which no other run may be in progress at the same time
    has_thread: bool = False  # a separate thread of the host waits for the client, rather than one of XLA's threads
    awaited: int = 0  # number of dependencies that must be resolved or enqueued before the nodes may join their lines
    is_enqueued: bool = False  # the nodes have joined their lines
    is_resolved: bool = False  # other launches may use the results: when enqueued, unless `host_call` is set
    on_enqueued: list[Dependency[Payload]] = field(default_factory=list)
    on_resolved: list[Dependency[Payload]] = field(default_factory=list)


class OnIslands:
    """Work on the `hosts` of one `island`, or on the hosts at `places` of several `islands`."""

    __slots__ = ()
    island: int
    hosts: tuple[int, ...]
    islands: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def all_islands(self) -> tuple[int, ...]:
        return self.islands or (self.island,)

    @property
    def by_island(self) -> Iterable[tuple[int, tuple[int, ...]]]:
        """Return the hosts of the gang by island."""
        return zip(self.islands, self.places, strict=True) if self.islands else ((self.island, self.hosts),)


class Gang(msgspec.Struct, OnIslands, StateMachine[GangState], Generic[Payload], eq=False):
    """The part of a node on one island, which the hosts of the island start together.

    A *joint* gang is all of a node, on many islands, whose hosts start it together. The
    `GangSpec` of a program has what is the same in all of its launches.
    """

    transitions = TRANSITIONS
    sequence: int  # identifies it, not its position in the order of its islands: it is given when the gang is made
    island: int
    node: QueuedNode[Payload]
    run: Payload
    estimate: int = UNKNOWN_NS  # expected busy time per device, in nanoseconds, which is updated at commitment
    exclusive: bool = False  # runs while nothing else is in flight
    weight: int = 1  # how much of the window of each of its hosts it takes
    hosts: tuple[int, ...] = (0,)  # of the island
    devices: int = 1  # number of devices that it keeps busy, on each of its islands
    duration_source: HasDuration | None = None  # has the estimate at commitment
    charged: int = 0  # charged to its session in advance, in the unit of the island's policy
    state: GangState = GangState.NEW
    started_at: float = -1.0  # when its island was ready to start it, by the controller's clock
    # Of a joint gang: its islands, and its hosts on each of them; `island` is the first. See `state.joint_gangs`.
    islands: tuple[int, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    charges: dict[int, int] | None = None  # of a joint gang: `charged` by island, where it is not 0
    # Of a committed joint gang, or the first gang of a node that starts together: an island that cannot start it yet.
    blocked_on: int = -1

    def _described(self) -> str:
        return f"gang {self.sequence}"

    def is_on(self, island: int) -> bool:
        """Return whether the gang has hosts of the island."""
        return island in self.islands if self.islands else island == self.island

    @property
    def is_unsent(self) -> bool:
        """Return whether the gang was not sent to its hosts, and still may be."""
        return self.state <= GangState.COMMITTED

    @property
    def is_over(self) -> bool:
        """Return whether the gang has ended or failed, or was dropped."""
        return self.state >= GangState.DONE

    @property
    def keeps_order(self) -> bool:
        """Return whether later launches of the session wait for this gang of a delegated run."""
        return GangState.COMMITTED <= self.state < GangState.RUNNING


class Step(NamedTuple):
    """A transition of a gang."""

    seconds: float  # when it happened, by the controller's clock
    state: GangState  # the new one
    reason: Reason  # to wait from then on


def story(gang: Gang[Payload]) -> list[Step]:
    """Return the transitions of a gang, from its launch on, without its end.

    The first reasons to wait are recorded one by one, and the last of `MAX_REASONS` stands for those that followed.
    """
    node = gang.node
    waits = [*(node.waited or ()), (node.reason, 0.0)]
    seconds = node.since - sum([each for _, each in waits])
    steps = []
    for reason, duration in waits:
        state = GangState.READY if reason is Reason.ORDER else GangState.WAITING
        steps.append(Step(seconds, state, reason))
        seconds += duration
    if gang.state < GangState.COMMITTED:
        steps[-1] = Step(node.since, gang.state, node.reason)
        return steps
    if node.committed_at < 0:  # it was dropped before
        return steps
    steps.append(Step(node.committed_at, GangState.COMMITTED, Reason.ORDER))
    if gang.started_at >= 0:
        steps.append(Step(gang.started_at, gang.state, Reason.ORDER))
    return steps


class Dropped(NamedTuple, Generic[Payload]):
    """The gangs of a node that were dropped. If `were_committed`, they had their places in the order."""

    node: QueuedNode[Payload]
    gangs: list[Gang[Payload]]
    were_committed: bool
