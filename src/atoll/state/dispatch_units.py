"""Dispatch units: short nodes of a program that are dispatched together, as one gang.

A node that is a gang of its own costs the controller some ten microseconds and its hosts as many. Where nodes take
little more than that, and no other session wants their island, those that follow one another on the same devices are
joined into one unit: half of what may be in flight, by time or by count. Others still get in between within
milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from atoll.cluster.locations import total
from atoll.state.gangs import DurationEstimate, GangSpec

UNIT_NS = 4_000_000
MOST_SEGMENTS = 12
# Launches after which a program's units are formed anew: doubled each time.
_FIRST_LOOK = 4
# A node is known when it has run as often: the first run often takes longer.
_LEAST_RUNS = 2

# A dispatch unit is its gangs, one an island: of one node, or of several on the same island.
Unit = tuple[GangSpec, ...]


class UnitBuilder:
    """Forms the dispatch units of a program's launches, by what its nodes turned out to take."""

    def __init__(self, nodes: tuple[Unit, ...]) -> None:
        self._nodes = nodes
        self._joined = nodes
        self._launches = 0
        self._next_look = _FIRST_LOOK
        self._forming: _Forming | None = None

    def next_launch(self, *, may_join: bool) -> tuple[Unit, ...]:
        """The units of one more launch, in order; with `may_join`, short nodes are joined."""
        if len(self._nodes) == 1:
            return self._nodes
        self.begin_launch()
        if self._forming is not None:
            self.form(len(self._nodes))
        return self.units(may_join=may_join)

    def begin_launch(self) -> None:
        """Note one more launch. For some launches the units are formed again: `form` has to follow."""
        self._launches += 1
        if self._launches == self._next_look:
            self._next_look *= 2
            self._forming = _Forming(self._nodes, self._joined)

    def form(self, count: int) -> bool:
        """Continue with about so many nodes. Return whether the units are formed."""
        if self._forming is not None and self._forming.proceed(count):
            self._joined = tuple(self._forming.units)
            self._forming = None
        return self._forming is None

    def units(self, *, may_join: bool) -> tuple[Unit, ...]:
        """The units as they were formed last, in order; with `may_join`, short nodes are joined."""
        return self._joined if may_join else self._nodes


class _Forming:
    """Units that are formed again at present. Nodes took what their unit took, in equal parts."""

    def __init__(self, nodes: Sequence[Unit], joined: Sequence[Unit]) -> None:
        self.units: list[Unit] = []
        self._nodes, self._before = nodes, joined
        self._node = self._unit = 0  # the next ones
        self._open: list[GangSpec] = []

    def proceed(self, count: int) -> bool:
        """Continue with about so many nodes. Return whether all are in units."""
        stop = self._node + count
        while self._node < stop and self._unit < len(self._before):
            unit = self._before[self._unit]
            each = self._nodes[self._node : self._node + unit[0].segments]
            took = unit[0].duration_estimate
            if len(each) > 1 and took.runs:
                for (gang,) in each:  # a guess, which is not for others that do the same
                    gang.duration_estimate = DurationEstimate(
                        took.nanoseconds // len(each), gang.duration_estimate.runs
                    )
            for node in each:
                self._add(node)
            self._unit += 1
            self._node += len(each)
        if self._unit < len(self._before):
            return False
        self._close()
        return True

    def _add(self, node: Unit) -> None:
        may_join = len(node) == 1 and _is_plain(node[0]) and _is_known(node[0])
        if not (may_join and self._open and _fits(self._open, node[0])):
            self._close()
        if may_join:
            self._open.append(node[0])
        else:
            self.units.append(node)

    def _close(self) -> None:
        if self._open:
            self.units.append((_joined(self._open),))
            self._open = []


def join(nodes: Sequence[Unit]) -> tuple[Unit, ...]:
    """The nodes in units that are as long as they may be."""
    forming = _Forming(nodes, nodes)
    forming.proceed(len(nodes))
    return tuple(forming.units)


def _is_plain(gang: GangSpec) -> bool:
    """Whether it needs nothing but the devices: no bytes of the client or of other hosts, and sends none."""
    return gang.kind in ("call", "move", "rearrange") and not (gang.awaited or gang.incoming or gang.host_call)


def _is_known(gang: GangSpec) -> bool:
    return gang.duration_estimate.runs >= _LEAST_RUNS


def _fits(unit: Sequence[GangSpec], gang: GangSpec) -> bool:
    last = unit[-1]
    return (
        len(unit) < MOST_SEGMENTS
        and (gang.island, gang.hosts) == (last.island, last.hosts)
        and sum(each.duration_estimate.nanoseconds for each in unit) + gang.duration_estimate.nanoseconds <= UNIT_NS
    )


def _counted(display_names: Iterable[str]) -> Iterator[str]:
    """As people read them: those that follow themselves once, with how often."""
    for title, same in groupby(display_names):
        count = len(list(same))
        yield title if count == 1 else f"{title} x{count}"


def _joined(gangs: Sequence[GangSpec]) -> GangSpec:
    """One gang of several nodes. What is made and dropped within it is part of what it needs while it runs."""
    first = gangs[0]
    if len(gangs) == 1:
        return first
    dropped = {value for gang in gangs for value in gang.drops}
    made = {each.value for gang in gangs for each in gang.makes}
    within = (dropped & made).difference(*(each.views for gang in gangs for each in gang.makes))
    return GangSpec(
        island=first.island,
        hosts=first.hosts,
        kind=first.kind,
        functions=tuple({name: None for gang in gangs for name in gang.functions}),
        awaited=(),
        incoming=(),
        handles=tuple(sorted({handle for gang in gangs for handle in gang.handles})),
        makes=tuple(each for gang in gangs for each in gang.makes if each.value not in within),
        consumes=tuple({value: None for gang in gangs for value in gang.consumes if value not in made}),
        drops=tuple(sorted(dropped - within)),
        scratch=total(
            [
                max((gang.scratch for gang in gangs), key=lambda scratch: sum(nbytes for _, nbytes in scratch)),
                *(each.requirement for gang in gangs for each in gang.makes if each.value in within),
            ]
        ),
        collective=any(gang.collective for gang in gangs),
        devices={host: tuple(sorted({d for gang in gangs for d in gang.devices[host]})) for host in first.hosts},
        duration_estimate=DurationEstimate(sum(gang.duration_estimate.nanoseconds for gang in gangs)),
        segments=len(gangs),
        moved=sum(gang.moved for gang in gangs),
        title=", ".join(_counted([gang.title for gang in gangs if gang.title])),
    )
