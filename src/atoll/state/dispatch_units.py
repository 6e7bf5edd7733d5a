"""Dispatch units: short nodes of a program that are dispatched together, as one gang.

Each gang costs the controller and its hosts some ten microseconds. If no other session waits for the island, short
nodes that follow one another on the same hosts are joined. A unit is at most half of the work that may be in flight,
by time and by count, so another session that arrives still gets its turn within milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from atoll.cluster.locations import total
from atoll.state.gang_specs import DurationEstimate, GangSpec

# Limits of a unit: its expected duration, and its nodes.
UNIT_NS = 4_000_000
MAX_SEGMENTS = 12
# Launches before a program's units are formed again. The number doubles each time.
_FIRST_LOOK = 4
# Runs from which the duration of a node is known. The first run often takes longer.
_MIN_RUNS = 2

# The gangs of a dispatch unit, one per island: either those of one node, or one gang of several nodes on one island.
Unit = tuple[GangSpec, ...]


class UnitBuilder:
    """Forms the dispatch units of a program's launches, based on the measured durations of its nodes."""

    def __init__(self, nodes: tuple[Unit, ...]) -> None:
        self._nodes = nodes
        self._joined = nodes
        self._launches = 0
        self._next_look = _FIRST_LOOK
        self._forming: _Forming | None = None

    def next_launch(self, *, may_join: bool) -> tuple[Unit, ...]:
        """Return the units of the next launch, in order. If `may_join` is set, short nodes are joined."""
        if len(self._nodes) == 1:
            return self._nodes
        self.begin_launch()
        if self._forming is not None:
            self.form(len(self._nodes))
        return self.units(may_join=may_join)

    def begin_launch(self) -> None:
        """Count a launch. Before some launches the units have to be formed again, by calls of `form`."""
        self._launches += 1
        if self._launches == self._next_look:
            self._next_look *= 2
            self._forming = _Forming(self._nodes, self._joined)

    def form(self, count: int) -> bool:
        """Continue to form the units, with about `count` nodes. Return whether they are formed."""
        if self._forming is not None and self._forming.proceed(count):
            self._joined = tuple(self._forming.units)
            self._forming = None
        return self._forming is None

    @property
    def nodes(self) -> tuple[Unit, ...]:
        """The single nodes."""
        return self._nodes

    def units(self, *, may_join: bool) -> tuple[Unit, ...]:
        """Return the units that were formed last, in order. If `may_join` is not set, return the single nodes."""
        return self._joined if may_join else self._nodes


class _Forming:
    """Units that are being formed. The measured duration of a previous unit counts for its nodes in equal parts."""

    def __init__(self, nodes: Sequence[Unit], joined: Sequence[Unit]) -> None:
        self.units: list[Unit] = []
        self._nodes, self._before = nodes, joined
        self._node = self._unit = 0  # the next ones
        self._open: list[GangSpec] = []

    def proceed(self, count: int) -> bool:
        """Continue with about `count` nodes. Return whether all nodes are in units."""
        stop = self._node + count
        while self._node < stop and self._unit < len(self._before):
            unit = self._before[self._unit]
            each = self._nodes[self._node : self._node + unit[0].segments]
            took = unit[0].duration_estimate
            if len(each) > 1 and took.runs:
                for (gang,) in each:  # not shared with other gangs that do the same, since it is a guess
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
    """Join the nodes into units that are as long as possible."""
    forming = _Forming(nodes, nodes)
    forming.proceed(len(nodes))
    return tuple(forming.units)


def _is_plain(gang: GangSpec) -> bool:
    """Return whether the gang needs only its devices: it exchanges no data with the client or with other hosts."""
    return gang.kind in ("call", "move", "rearrange") and not (gang.awaited or gang.incoming or gang.host_call)


def _is_known(gang: GangSpec) -> bool:
    return gang.duration_estimate.runs >= _MIN_RUNS


def _fits(unit: Sequence[GangSpec], gang: GangSpec) -> bool:
    last = unit[-1]
    return (
        len(unit) < MAX_SEGMENTS
        and (gang.island, gang.hosts) == (last.island, last.hosts)
        and sum(each.duration_estimate.nanoseconds for each in unit) + gang.duration_estimate.nanoseconds <= UNIT_NS
    )


def _counted(display_names: Iterable[str]) -> Iterator[str]:
    """Yield the names with repetitions in a row replaced by a count."""
    for title, same in groupby(display_names):
        count = len(list(same))
        yield title if count == 1 else f"{title} x{count}"


def _joined(gangs: Sequence[GangSpec]) -> GangSpec:
    """Return one gang for several nodes. Its scratch memory includes the values that are made and dropped within it."""
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
        is_apart=all(gang.is_apart for gang in gangs if gang.collective),
        islands=first.islands,
        places=first.places,
        nodes=tuple(gangs) if first.islands else (),
    )


def parts_of(gang: GangSpec) -> tuple[GangSpec, ...]:
    """Return the gangs on the islands of a joint gang, or the gang itself if it is on one island."""
    if not gang.islands:
        return (gang,)
    if not gang.parts:
        gang.parts = tuple([_joined(some) for some in zip(*[node.parts for node in gang.nodes], strict=True)])
    return gang.parts
