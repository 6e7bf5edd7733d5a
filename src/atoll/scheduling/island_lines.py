"""What the scheduler keeps of an island: who waits for it, and how much is in flight on its hosts."""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass, field, replace
from typing import Generic

from atoll.scheduling.grouped_counts import CountGroup, GroupedCounts
from atoll.scheduling.in_flight import least_in_flight
from atoll.scheduling.policy import Policy
from atoll.scheduling.queued_nodes import Gang, Payload, QueuedNode

# Sets of hosts whose loads are remembered.
_MOST_KNOWN = 1024


@dataclass(slots=True)
class HostLoad:
    """What is in flight on one host."""

    in_flight: int = 0
    busy_ns: int = 0
    full: bool = False

    @property
    def least(self) -> int:
        """So many are in flight however long they take."""
        return least_in_flight(self.busy_ns)


def _no_loads() -> GroupedCounts[int, HostLoad]:
    return GroupedCounts(replace, astuple)


@dataclass(slots=True)
class IslandLines(Generic[Payload]):
    """An island's lines, the gangs that have their places in its order, and what is in flight."""

    policy: Policy
    window: int
    most_busy_ns: int
    hosts: int = 1
    loads: GroupedCounts[int, HostLoad] = field(default_factory=_no_loads)  # of hosts that have had work
    # By the hosts of gangs.
    known_loads: dict[tuple[int, ...], list[CountGroup[int, HostLoad]]] = field(default_factory=dict)
    loads_version: int = 0  # for which these are known
    full_hosts: int = 0
    lines: dict[int, deque[QueuedNode[Payload]]] = field(default_factory=dict)  # by session
    committed: deque[Gang[Payload]] = field(default_factory=deque)
    paused: bool = False
    excluded: set[int] = field(default_factory=set)  # sessions that may not start anything here
    draining: bool = False  # until nothing is in flight: for an exclusive gang
    in_flight: int = 0
    busy_ns: int = 0
    unbounded: int = 0  # gangs in flight that run host Python
    started: int = 0
    delegated: dict[int, int] = field(default_factory=dict)  # by session: committed runs that are not over
    newest: int = 0  # the session that has started something last
    exclusive_since: float = float("-inf")  # when another session started a gang last

    def others_wait(self, session: int) -> bool:
        """Whether sessions other than this one have nodes in line."""
        lines = self.lines
        return len(lines) > 1 or (len(lines) == 1 and session not in lines)

    def note_start(self, session: int, now: float) -> None:
        """A gang of the session starts."""
        self.started += 1
        if session != self.newest:
            self.exclusive_since = now if self.newest else self.exclusive_since
            self.newest = session

    def is_full(self, load: HostLoad) -> bool:
        """Whether the host with this load has no room."""
        if load.in_flight >= self.window:
            return True
        # While an unbounded gang runs, gangs in flight may wait for it, and it may wait for gangs in line.
        return not self.unbounded and load.busy_ns >= self.most_busy_ns and load.in_flight >= load.least

    def count_unbounded(self, change: int) -> None:
        """Change the number of unbounded gangs in flight."""
        self.unbounded += change
        self.full_hosts = 0
        for group in self.loads:
            group.count.full = self.is_full(group.count)
            self.full_hosts += len(group.keys) * group.count.full

    def loads_of(self, hosts: tuple[int, ...]) -> list[CountGroup[int, HostLoad]]:
        """Of these hosts."""
        if self.loads_version != self.loads.version or len(self.known_loads) > _MOST_KNOWN:
            self.loads_version = self.loads.version
            self.known_loads.clear()
        groups = self.known_loads.get(hosts)
        if groups is None:
            groups = self.known_loads[hosts] = self.loads.of(hosts, HostLoad)
        return groups
