"""Short nodes of a program that share a turn.

A node is a gang of its own, and so costs the controller some ten microseconds and its hosts as many. Where nodes take
little more than that, and nobody else wants their island, those that follow one another on the same devices have one
turn together: half of what may be in flight, by time or by count. Others still get in between within milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.controller.memory.ledger import total
from atoll.scheduling.gangs import GangSpec

UNIT_NS = 4_000_000
MOST_SEGMENTS = 12
# Launches after which a program's nodes are looked at, and looked at again: doubled each time.
_FIRST_LOOK = 4
# A node is known when it has run as often: the first run often takes longer.
_LEAST_RUNS = 2

Nodes = tuple[tuple[GangSpec, ...], ...]


class UnitBuilder:
    """The turns of a program's launches, by what its nodes were learnt to take."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._shared = nodes
        self._launches = 0
        self._next_look = _FIRST_LOOK

    def next_launch(self, *, may_share: bool) -> Nodes:
        """What a launch does now, turn by turn."""
        if len(self._nodes) == 1:
            return self._nodes
        self._launches += 1
        if self._launches == self._next_look:
            self._next_look *= 2
            self._look()
        return self._shared if may_share else self._nodes

    def _look(self) -> None:
        """Nodes take what their shared turn took, in equal parts."""
        nodes = iter(self._nodes)
        for gangs in self._shared:
            each = [next(nodes) for _ in range(gangs[0].segments)]
            if len(each) > 1 and gangs[0].runs:
                for (gang,) in each:
                    gang.estimate = gangs[0].estimate // len(each)
        self._shared = shared(self._nodes)


def shared(nodes: Nodes) -> Nodes:
    """The nodes in turns as long as they may be."""
    turns: list[tuple[GangSpec, ...]] = []
    unit: list[GangSpec] = []
    for node in nodes:
        may_share = len(node) == 1 and _is_plain(node[0]) and _is_known(node[0])
        if unit and not (may_share and _fits(unit, node[0])):
            turns.append((_joined(unit),))
            unit = []
        if may_share:
            unit.append(node[0])
        else:
            turns.append(node)
    if unit:
        turns.append((_joined(unit),))
    return tuple(turns)


def _is_plain(gang: GangSpec) -> bool:
    """Whether it needs nothing but the devices: no bytes of the client or of other hosts, and sends none."""
    return gang.work in ("call", "move", "rearrange") and not gang.awaited and not gang.incoming


def _is_known(gang: GangSpec) -> bool:
    return gang.runs >= _LEAST_RUNS


def _fits(unit: Sequence[GangSpec], gang: GangSpec) -> bool:
    last = unit[-1]
    return (
        len(unit) < MOST_SEGMENTS
        and (gang.island, gang.hosts) == (last.island, last.hosts)
        and sum(each.estimate for each in unit) + gang.estimate <= UNIT_NS
    )


def _joined(gangs: Sequence[GangSpec]) -> GangSpec:
    """One turn of several nodes. What is made and dropped within it is part of what it needs while it runs."""
    first = gangs[0]
    if len(gangs) == 1:
        return first
    dropped = {value for gang in gangs for value in gang.drops}
    made = {value for gang in gangs for value, _, _ in gang.makes}
    within = (dropped & made).difference(*(views for gang in gangs for _, _, views in gang.makes))
    return GangSpec(
        island=first.island,
        hosts=first.hosts,
        work=first.work,
        functions=tuple({name: None for gang in gangs for name in gang.functions}),
        awaited=(),
        incoming=(),
        handles=tuple(sorted({handle for gang in gangs for handle in gang.handles})),
        makes=tuple(each for gang in gangs for each in gang.makes if each[0] not in within),
        consumes=tuple({value: None for gang in gangs for value in gang.consumes if value not in made}),
        drops=tuple(sorted(dropped - within)),
        scratch=total(
            [
                max((gang.scratch for gang in gangs), key=lambda needs: sum(nbytes for _, nbytes in needs)),
                *(needs for gang in gangs for value, needs, _ in gang.makes if value in within),
            ]
        ),
        collective=any(gang.collective for gang in gangs),
        estimate=sum(gang.estimate for gang in gangs),
        segments=len(gangs),
    )
