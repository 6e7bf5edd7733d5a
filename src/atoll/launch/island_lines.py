"""The lines, committed gangs and work in flight of islands. Islands that are used together share them.

The scheduler keeps these counts. This module decides which islands share an object with them. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import islice
from typing import Generic

from atoll.cluster.lifecycle import WORKING, Island
from atoll.launch.policy import Policy
from atoll.state.grouped_counts import CountGroup, GroupedCounts
from atoll.state.host_window import HostWindow
from atoll.state.queued_nodes import Gang, Payload, QueuedNode

# Limit for the sets of hosts whose loads are cached, and for the joint gangs whose lines are.
_MAX_KNOWN = 1024
# Joint gangs after which islands try to share their lines. The number doubles with each try that fails, and each time
# that an island stops sharing.
_MAX_PATIENCE = 64
# Kinds of islands that begin to share their lines at once, each among themselves. Further kinds do not share.
_MAX_KINDS = 4


def _no_loads() -> GroupedCounts[int, HostWindow]:
    return GroupedCounts(replace, astuple)


@dataclass(slots=True)
class IslandLines(Generic[Payload]):
    """The lines of an island, its committed gangs, and its work in flight.

    Several islands may *share* this object while all of their attributes would be equal. The record, the hosts and the
    loads are then those of the first island, the one with the least number.

    The counts of work in flight repeat what `Launcher.in_flight` has, because each start needs several of them, and to
    sum up 24 gangs takes 1.4 us. `QueuedWork.count_differences` compares the two.
    """

    record: Island
    policy: Policy
    window: int
    most_busy_ns: int
    hosts: int = 1  # number of its hosts
    launch_ns: int = 0  # time that a launch costs a host, summed over its devices
    loads: GroupedCounts[int, HostWindow] = field(default_factory=_no_loads)  # of hosts that have had work
    known_loads: dict[tuple[int, ...], list[CountGroup[int, HostWindow]]] = field(default_factory=dict)  # by hosts
    loads_version: int = 0  # of `loads`, for which `known_loads` is valid
    full_hosts: int = 0
    lines: dict[int, deque[QueuedNode[Payload]]] = field(default_factory=dict)  # by session
    committed: deque[Gang[Payload]] = field(default_factory=deque)
    # Nothing starts until nothing is in flight, because of an exclusive gang. This is not the state `DRAINING`.
    draining: bool = False
    in_flight: int = 0
    busy_ns: int = 0
    unbounded: int = 0  # gangs in flight that run host Python
    started: int = 0
    delegated: dict[int, int] = field(default_factory=dict)  # committed runs that are not over, by session
    newest: int = 0  # the session that started the last gang
    exclusive_since: float = float("-inf")  # since when only `newest` has started gangs
    # Of shared lines: the records of the islands, in the order of their numbers, and by number the hosts of each.
    records: list[Island] = field(default_factory=list)
    places: dict[int, tuple[int, ...]] = field(default_factory=dict)
    patience: int = 1  # number of joint gangs after which the island tries to share its lines
    passed: int = 0  # joint gangs since the last try

    @property
    def islands(self) -> tuple[int, ...]:
        """Return the numbers of the islands whose lines these are."""
        return tuple(self.places) or (self.record.number,)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is in line, committed or in flight."""
        return not (self.lines or self.committed or self.in_flight or self.unbounded or self.delegated or self.draining)

    @property
    def takes_all(self) -> bool:
        """Return whether the island takes the nodes of all sessions. It does if it shares its lines."""
        return bool(self.places) or (self.record.state in WORKING and not self.record.needs_recompile)

    def is_like(self, other: IslandLines[Payload]) -> bool:
        """Return whether idle lines differ from these only in their islands."""
        own = self.window, self.hosts, self.launch_ns, self.newest
        return own == (other.window, other.hosts, other.launch_ns, other.newest) and self.policy.is_like(other.policy)

    def others_wait(self, session: int) -> bool:
        """Return whether sessions other than this one have nodes in line."""
        lines = self.lines
        return len(lines) > 1 or (len(lines) == 1 and session not in lines)

    def note_start(self, session: int, now: float) -> None:
        """Note that a gang of the session starts."""
        self.started += 1
        if session != self.newest:
            self.exclusive_since = now if self.newest else self.exclusive_since
            self.newest = session

    def start(self, gang: Gang[Payload], groups: Sequence[CountGroup[int, HostWindow]], now: float) -> None:
        """Start the first committed gang. `groups` has the loads of its hosts on this island."""
        self.committed.popleft()
        self.in_flight += gang.weight
        self.busy_ns += gang.estimate
        self.draining = gang.exclusive
        self.note_start(gang.node.session, now)
        weight, estimate = gang.weight, gang.estimate
        for group in groups:
            load = group.count
            load.start(weight, estimate)
            if self.is_full(load):
                load.full = True
                self.full_hosts += len(group.keys)
            else:
                load.full = False
        if not weight:
            self.count_unbounded(1)

    def claim(self, gang: Gang[Payload], hosts: tuple[int, ...]) -> Sequence[CountGroup[int, HostWindow]] | None:
        """Return the loads of these hosts, where the first committed gang may `start` now, or None if it has to wait.

        If it has to wait, nothing else takes the place that it needs: hosts that lack it are full from now on, and
        nothing starts on the island of an exclusive gang until nothing is in flight.
        """
        groups, weight, found = self.loads_of(hosts), gang.weight, False
        for group in groups:
            load = group.count
            if load.full:
                found = True
            elif load.in_flight and load.in_flight + weight > self.window:
                load.full = found = True  # for this gang; one that exceeds the window starts when nothing is in flight
                self.full_hosts += len(group.keys)
        if found:
            return None
        if gang.exclusive and self.in_flight:
            self.draining = True
            return None
        return groups

    def is_full(self, load: HostWindow) -> bool:
        """Return whether a host with this load is full."""
        if load.in_flight >= self.window:
            return True
        # While an unbounded gang runs, gangs in flight may wait for it, and it may wait for gangs in line.
        return not self.unbounded and load.is_busy(self.most_busy_ns)

    def count_unbounded(self, change: int) -> None:
        """Change the number of unbounded gangs in flight."""
        self.unbounded += change
        self.full_hosts = 0
        for group in self.loads:
            group.count.full = self.is_full(group.count)
            self.full_hosts += len(group.keys) * group.count.full

    def loads_of(self, hosts: tuple[int, ...]) -> list[CountGroup[int, HostWindow]]:
        """Return the loads of these hosts."""
        if self.loads_version != self.loads.version or len(self.known_loads) > _MAX_KNOWN:
            self.loads_version = self.loads.version
            self.known_loads.clear()
        groups = self.known_loads.get(hosts)
        if groups is None:
            groups = self.known_loads[hosts] = self.loads.of(hosts, HostWindow)
        return groups

    def part(self, records: list[Island]) -> IslandLines[Payload]:
        """Return a copy of shared lines for some of the islands, in the order of their numbers."""
        part = replace(
            self,
            policy=self.policy.copy(),
            lines={session: deque(line) for session, line in self.lines.items()},
            committed=deque(self.committed),
            delegated={},
        )
        part.limit(records)
        return part

    def limit(self, records: list[Island]) -> None:
        """Have only some of the islands share the lines, in the order of their numbers."""
        places, is_shared = self.places, len(records) > 1
        self.record = records[0]
        self.loads = self.loads.renamed(places[self.record.number])
        self.known_loads, self.loads_version = {}, 0
        self.records = records if is_shared else []
        self.places = {record.number: places[record.number] for record in records} if is_shared else {}
        self.patience, self.passed = min(2 * self.patience, _MAX_PATIENCE), 0


# The lines of a joint gang, without repetitions. For each of them, where their first island is among those of the gang.
Span = list[tuple[IslandLines[Payload], int]]


class SharedLines(Generic[Payload]):
    """Decides which islands share their lines.

    A joint gang is in the lines and in the order of each of its islands. If islands share their lines, that costs the
    same for hundreds of them as for one. The rules:

    - Islands begin to share their lines when a joint gang is about to join them that uses all of their hosts, if the
      lines are idle and alike. Then one object stands for all that are alike.
    - While islands share lines, only joint gangs that use all hosts of all of them join these lines. So the lines that
      each island would have remain equal, and each decision is the one that each island would make.
    - Before anything happens to only some of the islands, they get copies: before another gang joins their lines, and
      when an island fails or has other limits. Gangs in line, committed and in flight are then in all copies, in the
      same order.

    The orders of islands are therefore those that they would have without sharing, and do not contradict. It takes as
    long to divide lines as to read them, so an island that has to stop sharing shares again only after more and more
    joint gangs.

    Args:
      of: the lines of each island, which this object replaces.
      started: by island, the number of gangs that it has started in addition to those that its lines count.
    """

    def __init__(self, of: list[IslandLines[Payload]], started: dict[int, int]) -> None:
        self._of = of
        self._started = started
        # By the identity of the places of joint gangs, which must stay alive: hashing them takes longer than all else.
        self._spans: dict[int, tuple[tuple[tuple[int, ...], ...], Span[Payload], Sequence[IslandLines[Payload]]]] = {}

    def all(self) -> list[IslandLines[Payload]]:
        """Return all lines, without repetitions."""
        return list({id(lines): lines for lines in self._of}.values())

    def started(self, island: int) -> int:
        """Return the number of gangs that the island has started."""
        return self._of[island].started + self._started.get(island, 0)

    def span(self, gang: Gang[Payload]) -> Span[Payload]:
        """Return the lines of a joint gang that has joined them."""
        known = self._spans.get(id(gang.places))
        return self._find(gang) if known is None else known[1]

    def lines_of(self, gang: Gang[Payload]) -> Sequence[IslandLines[Payload]]:
        """Return the lines of `span`, without their places."""
        known = self._spans.get(id(gang.places))
        return [lines for lines, _ in self._find(gang)] if known is None else known[2]

    def join(self, gang: Gang[Payload], touched: set[int]) -> Span[Payload]:
        """Return the lines of a joint gang that is about to join them.

        Add the islands of divided lines to `touched`.
        """
        known = self._spans.get(id(gang.places))
        if known is None:
            self._divide_for(gang, touched)
        span = self._find(gang) if known is None else known[1]
        return self._find(gang) if len(span) > 1 and self._unite(gang, span) else span

    def leave(self, island: int, touched: set[int]) -> None:
        """Have an island stop sharing its lines. Add the islands of divided lines to `touched`."""
        lines = self._of[island]
        if lines.places:
            (own,) = [record for record in lines.records if record.number == island]
            self._divide(lines, [[own], [record for record in lines.records if record is not own]], touched)

    def _find(self, gang: Gang[Payload]) -> Span[Payload]:
        where = {island: i for i, island in enumerate(gang.islands)}
        lines = {id(each): each for each in map(self._of.__getitem__, gang.islands)}
        span = [(each, where[each.record.number]) for each in lines.values()]
        if len(self._spans) >= _MAX_KNOWN:
            self._spans.clear()
        self._spans[id(gang.places)] = gang.places, span, [each for each, _ in span]
        return span

    def _divide_for(self, gang: Gang[Payload], touched: set[int]) -> None:
        """Divide shared lines if a joint gang is not on all of their islands, or does not use all of their hosts."""
        places = dict(zip(gang.islands, gang.places, strict=True))
        shared = {id(lines): lines for lines in map(self._of.__getitem__, gang.islands) if lines.places}
        for lines in shared.values():
            alone: list[list[Island]] = []  # islands of which it does not use all hosts
            whole: list[Island] = []
            others: list[Island] = []
            for record in lines.records:
                hosts = places.get(record.number)
                if hosts is None:
                    others.append(record)
                elif hosts == lines.places[record.number]:
                    whole.append(record)
                else:
                    alone.append([record])
            parts = [part for part in (*alone, whole, others) if part]
            if len(parts) > 1:
                self._divide(lines, parts, touched)

    def _divide(self, lines: IslandLines[Payload], parts: Sequence[list[Island]], touched: set[int]) -> None:
        """Have islands share their lines only with those of their part. The last part keeps these lines."""
        *leaving, staying = parts
        for records in leaving:
            part = lines.part(records)
            for record in records:
                self._of[record.number] = part
        lines.limit(staying)
        touched.update([records[0].number for records in parts])
        for line in lines.lines.values():
            node: QueuedNode[Payload]
            for node in islice(line, 1, None):
                node.behind += len(leaving)  # the number of lines that it is in besides
        self._spans.clear()

    def _unite(self, gang: Gang[Payload], span: Span[Payload]) -> bool:
        """Have islands of a joint gang share their lines if they are idle and alike. Return whether some do now."""
        clock, _ = span[0]
        clock.passed += 1
        if clock.passed < clock.patience:
            return False
        clock.passed = 0
        kinds: list[list[IslandLines[Payload]]] = []  # lines that are alike
        for lines, at in span:
            if lines.is_idle and lines.takes_all and lines.hosts == len(gang.places[at]):
                kind = next((each for each in kinds if lines.is_like(each[0])), None)
                if kind is not None:
                    kind.append(lines)
                elif len(kinds) < _MAX_KINDS:
                    kinds.append([lines])
        several = [alike for alike in kinds if len(alike) > 1]
        if not several:
            clock.patience = min(2 * clock.patience, _MAX_PATIENCE)
            return False
        places = dict(zip(gang.islands, gang.places, strict=True))
        for alike in several:
            self._share(alike, places, clock.patience)
        self._spans.clear()
        return True

    def _share(self, alike: list[IslandLines[Payload]], places: Mapping[int, tuple[int, ...]], patience: int) -> None:
        """Have islands share their lines, which are idle and alike. `places` has the hosts of each."""
        records = [record for lines in alike for record in lines.records or [lines.record]]
        records.sort(key=lambda record: record.number)
        together = replace(
            alike[0],
            record=records[0],
            loads=_no_loads(),
            known_loads={},
            loads_version=0,
            full_hosts=0,
            exclusive_since=max([lines.exclusive_since for lines in alike]),
            records=records,
            places={record.number: places[record.number] for record in records},
            patience=patience,
        )
        for record in records:
            self._started[record.number] = self.started(record.number) - together.started
            self._of[record.number] = together

    def validate(self) -> None:
        """Raise AssertionError if islands share lines that must not. For tests."""
        for island, lines in enumerate(self._of):
            assert island in lines.islands
            assert not lines.places or len(lines.places) > 1
        for lines in self.all():
            assert lines.record.number == lines.islands[0]
            assert [record.number for record in lines.records] == list(lines.places)
            for record in lines.records:
                assert self._of[record.number] is lines
                assert record.state in WORKING, f"{record} shares lines"
                assert not record.needs_recompile, f"{record} shares lines"
            if lines.places:
                in_line = [gang for line in lines.lines.values() for node in line for gang in node.gangs]
                assert all(set(lines.places) <= set(gang.islands) for gang in (*lines.committed, *in_line))
