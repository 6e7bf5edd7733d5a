"""The nodes that a scheduler has not started, and the counts of its islands. Nothing here changes them.

`scheduler` has the events that do. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Generic

import msgspec

from atoll.cluster.lifecycle import Island
from atoll.launch.island_lines import IslandLines, SharedLines
from atoll.launch.policy import Policy
from atoll.state.gang_states import GangState, Reason
from atoll.state.queued_nodes import Gang, Payload, QueuedNode


class SessionWait(msgspec.Struct, Generic[Payload], frozen=True):
    """The gangs of one session that wait for an island: their number, the first of them, and its reason."""

    session: int
    gangs: int
    first: Gang[Payload]
    reason: Reason


class SchedulerStatistics(msgspec.Struct, frozen=True):
    """The numbers of an island's gangs."""

    waiting: int
    in_flight: int
    busy_ns: int  # expected duration of the gangs in flight
    started: int
    window: int


class QueuedWork(Generic[Payload]):
    """The base class of the scheduler: nodes that wait for each island, their reasons, and the counts of islands."""

    def __init__(self, functions_of: Callable[[Gang[Payload]], Collection[str]] | None = None) -> None:
        self._functions_of = functions_of
        self._islands: list[IslandLines[Payload]] = []
        self._started: dict[int, int] = {}  # by island: gangs started in addition to those that its lines count
        self._lines = SharedLines(self._islands, self._started)
        self._deferred: dict[int, QueuedNode[Payload]] = {}  # in no line yet, by number

    def nodes(self, island: int) -> list[QueuedNode[Payload]]:
        """Return the nodes that wait for the island: first committed ones, then nodes in line, then deferred ones."""
        deferred = [each for each in self._deferred.values() if any(gang.is_on(island) for gang in each.gangs)]
        return [*self._in_lines(self._islands[island]), *deferred]

    def first_nodes(self, island: int) -> Iterator[tuple[int, QueuedNode[Payload]]]:
        """Yield sessions with nodes that wait for the island, with one of these nodes. A session may occur again."""
        lines = self._islands[island]
        yield from ((node.session, node) for node in self._committed_in(lines))
        yield from ((session, line[0]) for session, line in lines.lines.items())
        for node in self._deferred.values():
            if any(gang.is_on(island) for gang in node.gangs):
                yield node.session, node

    def all_nodes(self) -> list[QueuedNode[Payload]]:
        """Return all nodes that wait, each once, by their first island and then in the order of `nodes`."""
        return self._found(self._deferred.values(), self._in_lines)

    def nodes_of(self, sessions: Container[int]) -> list[QueuedNode[Payload]]:
        """Return the nodes of these sessions that wait, in the order of `all_nodes`."""
        deferred = [node for node in self._deferred.values() if node.session in sessions]
        return self._found(deferred, lambda lines: self._in_lines_of(lines, sessions))

    def _found(
        self,
        deferred: Iterable[QueuedNode[Payload]],
        in_lines: Callable[[IslandLines[Payload]], Iterator[QueuedNode[Payload]]],
    ) -> list[QueuedNode[Payload]]:
        by_island: dict[int, list[QueuedNode[Payload]]] = {}
        for node in deferred:
            by_island.setdefault(min(node.islands), []).append(node)
        found: dict[QueuedNode[Payload], None] = {}
        for lines in self._lines.all():
            found.update(dict.fromkeys(in_lines(lines)))
            for island in lines.islands if by_island else ():
                found.update(dict.fromkeys(by_island.get(island, ())))
        return list(found)

    def committed_nodes(self) -> list[QueuedNode[Payload]]:
        """Return the nodes with gangs that are committed and have not started, each once."""
        found: dict[QueuedNode[Payload], None] = {}
        for lines in self._lines.all():
            found.update(dict.fromkeys(self._committed_in(lines)))
        return list(found)

    def _in_lines(self, lines: IslandLines[Payload]) -> Iterator[QueuedNode[Payload]]:
        """Yield the nodes that are committed, and then those in line."""
        yield from self._committed_in(lines)
        for line in lines.lines.values():
            yield from line

    def _in_lines_of(self, lines: IslandLines[Payload], sessions: Container[int]) -> Iterator[QueuedNode[Payload]]:
        """Yield what `_in_lines` yields of these sessions."""
        yield from (node for node in self._committed_in(lines) if node.session in sessions)
        for session, line in lines.lines.items():
            if session in sessions:
                yield from line

    def _committed_in(self, lines: IslandLines[Payload]) -> Iterator[QueuedNode[Payload]]:
        return (gang.node for gang in lines.committed if gang.state is GangState.COMMITTED)

    def others_wait(self, island: int, session: int) -> bool:
        """Return whether sessions other than this one have nodes in line on the island."""
        return self._islands[island].others_wait(session)

    def others_wait_for(self, islands: Iterable[int], session: int) -> bool:
        """Return whether sessions other than this one have nodes in line on one of the islands."""
        last = None
        for island in islands:
            lines = self._islands[island]
            if lines is not last and lines.others_wait(session):
                return True
            last = lines
        return False

    def waits(self) -> dict[int, list[SessionWait[Payload]]]:
        """Return the waits for each island, one per session, in the order of their first gangs.

        Deferred nodes follow the nodes in line. There may be tens of thousands, so they are counted together.
        """
        found: dict[int, dict[int, tuple[int, Gang[Payload]]]] = {}  # number and first gang, by island and session

        def add(islands: Iterable[int], session: int, count: int, first: QueuedNode[Payload]) -> None:
            for island in islands:
                own = found.setdefault(island, {})
                before, gang = own.get(session, (0, None))
                own[session] = before + count, gang or _gang_on(first, island)

        for lines in self._lines.all():
            for gang in lines.committed:
                if gang.state is GangState.COMMITTED:
                    add(lines.islands, gang.node.session, 1, gang.node)
            for session, line in lines.lines.items():
                add(lines.islands, session, len(line), line[0])
        deferred: dict[tuple[Sequence[int], int], list[QueuedNode[Payload]]] = {}
        for node in self._deferred.values():
            deferred.setdefault((node.islands, node.session), []).append(node)
        for (islands, session), nodes in deferred.items():
            add(islands, session, len(nodes), nodes[0])
        return {
            island: [
                SessionWait(session, count, first, self._reason(first, self._islands[island]))
                for session, (count, first) in sorted(own.items(), key=lambda each: each[1][1].sequence)
            ]
            for island, own in sorted(found.items())
        }

    def is_idle(self, island: int) -> bool:
        """Return whether nothing is in flight on the island."""
        return not self._islands[island].in_flight

    def count_differences(self, in_flight: Iterable[Gang[Payload]]) -> Iterator[str]:
        """Yield a sentence for each island or host that counts other work than that of the gangs in flight."""
        by_island: dict[int, list[Gang[Payload]]] = {}
        for gang in in_flight:
            for each in gang.all_islands:
                by_island.setdefault(each, []).append(gang)
        for number, lines in enumerate(self._islands):
            gangs = by_island.get(number, [])
            loads: dict[int, list[int]] = {}
            for gang in gangs:
                for host in dict(gang.by_island)[number]:
                    load = loads.setdefault(host, [0, 0])
                    load[0] += gang.weight
                    load[1] += gang.estimate
            counted = lines.in_flight, lines.busy_ns, lines.unbounded
            weights = [gang.weight for gang in gangs]
            found = sum(weights), sum(gang.estimate for gang in gangs), weights.count(0)
            if counted != found:
                what = "segments in flight, expected ns and unbounded gangs"
                yield f"island {number} counts {counted} {what}, but has {found}"
            for group in lines.loads:
                for host in lines.places.get(number, ()) or group.keys:
                    counts, has = [group.count.in_flight, group.count.busy_ns], loads.get(host, [0, 0])
                    if counts != has:
                        yield f"host {host} counts {counts} segments in flight and expected ns, but has {has}"

    def _reason(self, gang: Gang[Payload], lines: IslandLines[Payload]) -> Reason:
        """Return why the gang, which is the first of its session, waits for the island."""
        if gang.state in (GangState.DEFERRED, GangState.WAITING):
            return gang.node.reason
        if not lines.record.works:
            return Reason.ISLAND
        if self._lacks_functions(gang, lines.record):
            return Reason.FUNCTIONS
        return Reason.ALONE if lines.draining else Reason.ORDER

    def _lacks_functions(self, gang: Gang[Payload], island: Island) -> bool:
        """Return whether the island has to compile a function again before the gang may start there."""
        lacking = island.needs_recompile.get(gang.node.session)
        if lacking is None:
            return False
        return self._functions_of is None or not lacking.isdisjoint(self._functions_of(gang))

    def policy_of(self, island: int) -> Policy:
        """Return the policy that chooses the nodes of an island."""
        return self._islands[island].policy

    def statistics(self, island: int) -> SchedulerStatistics:
        lines = self._islands[island]
        waiting = sum(len(line) for line in lines.lines.values()) + len(lines.committed)
        started = self._lines.started(island)
        return SchedulerStatistics(waiting, lines.in_flight, lines.busy_ns, started, lines.window)

    def validate(self) -> None:
        """Raise AssertionError if the states of gangs contradict the lines. For tests, since it looks at all nodes."""
        ahead: Counter[QueuedNode[Payload]] = Counter()  # by node: in how many lines others are ahead of it
        self._lines.validate()
        for lines in self._lines.all():
            assert all(gang.state in (GangState.COMMITTED, GangState.DROPPED) for gang in lines.committed)
            for line in lines.lines.values():
                assert all(before.age <= after.age for before, after in pairwise(line)), "lines are by age"
                for index, node in enumerate(line):
                    ahead[node] += index > 0
        for node, count in ahead.items():
            states = {gang.state for gang in node.gangs}
            assert node.behind == count, f"node {node.number} is behind in {count} lines and counts {node.behind}"
            assert states in ({GangState.WAITING}, {GangState.READY}), f"node {node.number} is in line, and {states}"
            is_ready = GangState.READY in states
            assert is_ready == (node.reason is Reason.ORDER), f"node {node.number} is {states} for {node.reason}"
            assert not (is_ready and (node.behind or node.missing > 0)), (
                f"node {node.number} is ready and lacks something"
            )
        for node in self._deferred.values():
            assert all(gang.state is GangState.DEFERRED for gang in node.gangs)


def _gang_on(node: QueuedNode[Payload], island: int) -> Gang[Payload]:
    """Return the gang of a node on one of the node's islands."""
    gangs = node.gangs
    return gangs[0] if len(gangs) == 1 else next(gang for gang in gangs if gang.is_on(island))
