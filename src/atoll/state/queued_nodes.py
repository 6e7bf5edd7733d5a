"""Define the nodes of launches that wait in line, and the gangs that they start.

See `gang_states` for the states of a gang.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from atoll.cluster.tenant_settings import DEFAULT_TENANT
from atoll.state.gang_states import LEGAL, GangState, Reason, Waited
from atoll.state.tenants import Tenant

# What a gang is about: the scheduler never looks at it.
Payload = TypeVar("Payload")

# What a gang counts that has not run yet: enough to keep a few of them in flight, whatever they turn out to be.
UNKNOWN_NS = 200_000

# Number of reasons to wait that a queued node records; the last one also stands for those that follow.
MOST_REASONS = 16

# The tenant of nodes in virtual time and in tests.
NOBODY = Tenant(DEFAULT_TENANT)


@dataclass(slots=True, eq=False)
class QueuedNode(Generic[Payload]):
    """A node of a launch that waits in line. `missing` counts the inputs that it lacks, such as bytes from its client.

    `age` orders it in the lines of its session. It equals `number`, unless the node became known after later launches.
    """

    number: int
    session: int
    missing: int = 0
    tenant: Tenant = NOBODY
    gangs: tuple[Gang[Payload], ...] = ()
    behind: int = 0  # in how many lines it is not at the head
    is_delegated: bool = False  # it is all of its launch: see `delegated_runs`
    dependency: Dependency[Payload] | None = None
    age: int = -1
    since: float = 0.0  # when it began to wait for `reason`, by the controller's clock
    reason: Reason = Reason.ORDER
    lacks: Reason = Reason.BYTES  # what is `missing`
    waited: list[tuple[Reason, float]] | None = None  # what it waited for before, and for how many seconds
    committed_at: float = -1.0  # by the controller's clock

    def __post_init__(self) -> None:
        if self.age < 0:
            self.age = self.number

    @property
    def is_pending(self) -> bool:
        """Whether its gangs may still get their places in the order: it is not committed, and was not dropped."""
        gangs = self.gangs
        return bool(gangs) and gangs[0].state < GangState.COMMITTED

    @property
    def is_in_line(self) -> bool:
        """Whether it is in the lines of its session."""
        return bool(self.gangs) and GangState.WAITING <= self.gangs[0].state <= GangState.READY

    @property
    def committed(self) -> bool:
        """Whether its gangs got their places in the order. For policies; some of them may have ended since."""
        return any(GangState.COMMITTED <= gang.state <= GangState.FAILED for gang in self.gangs)

    @property
    def dropped(self) -> bool:
        """Whether none of it waits any more, and none of it has started or will. For policies."""
        return all(gang.state is GangState.DROPPED for gang in self.gangs)

    def enter(self, state: GangState) -> None:
        """Change the state of all of its gangs."""
        for gang in self.gangs:
            gang.enter(state)

    def end(self) -> None:
        """Drop the references to the gangs, none of which will start. A dropped node may still be in line.

        Without this call the gangs, their launch and this node refer to one another until the garbage collector runs.
        """
        self.gangs = ()

    def wait_for(self, reason: Reason, now: float) -> None:
        """Change the reason for which the node waits."""
        if now > self.since:
            if self.waited is None:
                self.waited = []
            if len(self.waited) < MOST_REASONS:
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
    """Has the expected duration of gangs that do the same."""

    @property
    def expected(self) -> int:
        """Nanoseconds that the next one is expected to keep its devices busy."""


class HostCallKind(enum.Enum):
    """The kind of Python that a gang of unbounded duration calls on its host."""

    PYTHON = "python"  # colocated Python, beside the devices
    CLIENT = "client"  # the client's Python, called by its compiled function


@dataclass(slots=True, eq=False)
class Dependency(Generic[Payload]):
    """Nodes of one launch on which other launches may depend, and the state of these nodes.

    `is_enqueued` is set when the nodes join their lines. `is_resolved` is set when others may use their results: at the
    same time, unless `host_call` is set. `awaited` counts the dependencies that must be resolved, or enqueued, before
    the nodes may join their lines. See `launch.dependency_tracker`.
    """

    session: int
    nodes: tuple[QueuedNode[Payload], ...]  # none once it is resolved: arrays outlive their producers
    host_call: HostCallKind | None
    alone: frozenset[str] = frozenset()  # functions of which no other run may be under way meanwhile
    has_thread: bool = False  # that waits for its client on its host, so that none of XLA's does
    awaited: int = 0
    is_enqueued: bool = False
    is_resolved: bool = False
    on_enqueued: list[Dependency[Payload]] = field(default_factory=list)
    on_resolved: list[Dependency[Payload]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Gang(Generic[Payload]):
    """A node's part on one island: what its hosts start together.

    `estimate` is the time that it keeps each of `devices` devices busy, in nanoseconds: when it is committed, it
    becomes what `duration_source` expects then. `weight` is how much of the window it takes; with `exclusive`, nothing
    else is in flight meanwhile. `hosts` are those of the island that it runs on. `charged` is what its session paid for
    it in advance, as its island's policy counts.
    """

    sequence: int
    island: int
    node: QueuedNode[Payload]
    run: Payload
    estimate: int = UNKNOWN_NS
    exclusive: bool = False
    weight: int = 1
    hosts: tuple[int, ...] = (0,)
    devices: int = 1
    duration_source: HasDuration | None = None
    charged: int = 0
    state: GangState = GangState.NEW
    started_at: float = -1.0  # when its island had room for it, by the controller's clock

    def enter(self, state: GangState) -> None:
        """Change the state. An illegal transition is a bug of the controller's."""
        if not LEGAL[self.state] >> state & 1:
            raise AssertionError(f"gang {self.sequence} is {self.state.name} and cannot become {state.name}")
        self.state = state

    @property
    def is_unsent(self) -> bool:
        """Whether it was not sent to its hosts, and still may be."""
        return self.state <= GangState.COMMITTED

    @property
    def keeps_order(self) -> bool:
        """Whether what its session has launched later waits for this gang, if it is that of a delegated run."""
        return GangState.COMMITTED <= self.state < GangState.RUNNING


class Step(NamedTuple):
    """A transition of a gang: when, into which state, and what it waits for since then."""

    seconds: float
    state: GangState
    reason: Reason


def story(gang: Gang[Payload]) -> list[Step]:
    """Return the transitions of a gang that has not ended, from its launch on.

    The first reasons to wait are recorded one by one, and the last of `MOST_REASONS` stands for those that followed.
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
    steps.append(Step(node.committed_at, GangState.COMMITTED, Reason.ORDER))
    if gang.started_at >= 0:
        steps.append(Step(gang.started_at, gang.state, Reason.ORDER))
    return steps


class Dropped(NamedTuple, Generic[Payload]):
    """The gangs of a node that were dropped, which had their places in the order if `were_committed`."""

    node: QueuedNode[Payload]
    gangs: list[Gang[Payload]]
    were_committed: bool
