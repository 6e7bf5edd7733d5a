"""What is known of a program's runs before any of them: on each of its islands the gangs, in order, the memory that
they need at most, and what of it is left at the end. Runs of such a program may be delegated: see `delegated_runs`.

The memory is found by letting the gangs reserve theirs, on devices that have no limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

from atoll.cluster.locations import HostDevice, MemoryRequirement, total
from atoll.cluster.tenant_settings import DEFAULT_TENANT
from atoll.launch.reservations import Reservations
from atoll.state.buffer_directory import Entry
from atoll.state.gang_specs import GangSpec, HostFeeds, RunGangs
from atoll.state.programs import RegisteredProgram
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.session import GangRun, Launch
from atoll.state.tallies import TRANSFERS
from atoll.state.tenants import Tenant
from atoll.state.usage import Account

# Programs of fewer nodes are as well off with gangs of their own.
LEAST_NODES = 4
_SHORT_NS = 1_000_000
# Steps of gangs that may be part of a delegated run: they need nothing but devices and other hosts, and tell nothing
# but their ends.
_KINDS = frozenset({"call", "move", "send", "receive"})


class PartResult(NamedTuple):
    """A result of a run's part on an island. Its memory is that of argument `donor`, or new memory if `donor` is -1."""

    value: int
    requirement: MemoryRequirement
    donor: int


@dataclass(frozen=True, slots=True)
class PartMemory:
    """What a part needs on devices beside arguments: at most; while its first calls run; when its last gangs have
    started; and at its end.
    """

    most: dict[HostDevice, int]
    head: dict[HostDevice, int]
    tail: dict[HostDevice, int]
    left: dict[HostDevice, int]

    def behind(self, before: PartMemory) -> MemoryRequirement:
        """What a run needs that starts where one `before` it is about to end, beside what that one has."""
        found = {}
        for device in sorted({*self.most, *before.tail}):
            has = before.most.get(device, 0)
            together = before.tail.get(device, 0) + self.head.get(device, 0)
            after = before.left.get(device, 0) + self.most.get(device, 0)
            if max(together, after) > has:
                found[device] = max(together, after) - has
        return tuple(found.items())


class Transfers(NamedTuple):
    """Of the gangs of one kind before each place, and of all of them: how many there are, and the bytes they move."""

    kind: str
    counts: tuple[int, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IslandPart:
    """A program's part on one island: `each` of its gangs, in order. `whole` is what they need together: as scratch
    memory, the most that they ever need beside arguments.
    """

    each: RunGangs
    whole: GangSpec
    successor: GangSpec  # the same of a run behind another one: the memory is what it needs beside that one's
    memory: PartMemory
    results: tuple[PartResult, ...]
    lost: tuple[int, ...]  # arguments that have no memory of their own any more at the end
    devices: tuple[int, ...] | None  # of the host, where all its gangs have the same
    transfers: tuple[Transfers, ...]
    written: tuple[int, ...]  # bytes that are charged of the gangs before each place, and of all of them
    samples: dict[int, int]  # places whose durations are observed, and how many gangs do the same
    sample_places: tuple[int, ...]

    @property
    def gangs(self) -> tuple[GangSpec, ...]:
        return self.each.specs


@dataclass(frozen=True, slots=True)
class DelegatedProgram:
    """`nodes` has for each node its gangs on several islands, as (island, place in that part); none for others."""

    parts: dict[int, IslandPart]  # by island
    nodes: tuple[tuple[tuple[int, int], ...], ...]
    gangs: int
    ahead: int  # calls on a host from the first gang that has not ended to the newest, at most
    weight: int  # how much of an island's window a run takes

    @property
    def is_short(self) -> bool:
        """Whether its functions are known to take little time, on average."""
        known = [
            (part.gangs[place].duration_estimate, count)
            for part in self.parts.values()
            for place, count in part.samples.items()
        ]
        took = sum(each.nanoseconds * count for each, count in known)
        return all(each.runs for each, _ in known) and took < _SHORT_NS * sum(count for _, count in known)

    def close(self, limits: dict[int, int]) -> None:
        """Raises the segments up to which islands are to run, so that none waits for what another does not run.

        Of a node either all gangs are run or none; and of an island's gangs all that are before one that is.
        """
        for node in reversed(self.nodes):
            if any(limits[island] > place for island, place in node):
                for island, place in node:
                    limits[island] = max(limits[island], place + 1)


def delegated_program(
    program: RegisteredProgram, hosts_of: Callable[[int], int], ahead: int, weight: int
) -> DelegatedProgram | None:
    """Return the delegated program, or None if its runs cannot be delegated. `hosts_of(island)` counts hosts."""
    if len(program.islands) < 2 or len(program.nodes) < LEAST_NODES or program.is_unbounded or program.reports:
        return None
    if any(hosts_of(island) != 1 for island in program.islands):
        return None
    gangs = program.gangs
    for gang in gangs:
        if gang.kind not in _KINDS or gang.awaited or gang.collective or any(made.views for made in gang.makes):
            return None
    by_island: dict[int, list[int]] = {island: [] for island in program.islands}
    nodes, first, number = [], list[int](), 0
    for node in program.nodes:
        places = []
        for gang in node:
            places.append((gang.island, len(by_island[gang.island])))
            by_island[gang.island].append(number + len(places) - 1)
        first += [number] * len(node)
        number += len(node)
        if len(node) > 1:
            nodes.append(tuple(places))
    memory = _Memory(program)
    parts = {}
    for island, numbers in by_island.items():
        specs = tuple(gangs[each] for each in numbers)
        needs, results, lost = memory.run(specs, ahead)
        of_host = {devices for spec in specs for devices in spec.devices.values()}
        moved = tuple(_moved(program, spec) if spec.kind in TRANSFERS else 0 for spec in specs)
        devices = next(iter(of_host)) if len(of_host) == 1 else None
        last = {id(spec.duration_estimate): place for place, spec in enumerate(specs) if spec.functions}
        count = Counter(id(spec.duration_estimate) for spec in specs if spec.functions)
        samples = {place: count[which] for which, place in last.items()}
        transfers = tuple(
            Transfers(
                kind,
                _sums(spec.kind == kind for spec in specs),
                _sums(nbytes * (spec.kind == kind) for spec, nbytes in zip(specs, moved, strict=True)),
            )
            for kind in sorted({spec.kind for spec in specs} & TRANSFERS)
        )
        written = _sums(spec.moved for spec in specs)
        each = RunGangs(specs, moved, tuple(numbers), tuple(first[number] for number in numbers))
        whole = _whole(specs, tuple(sorted(needs.most.items())))
        successor = replace(whole, scratch=needs.behind(needs))
        parts[island] = IslandPart(
            each, whole, successor, needs, results, lost, devices, transfers, written, samples, tuple(samples)
        )
    return DelegatedProgram(parts, tuple(nodes), number, ahead, weight)


def _sums(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(numbers, initial=0))


def _whole(gangs: tuple[GangSpec, ...], peak: MemoryRequirement) -> GangSpec:
    first = gangs[0]
    (host,) = first.hosts
    incoming = tuple(feeds for gang in gangs for each in gang.incoming for feeds in each.feeds)
    return GangSpec(
        first.island,
        first.hosts,
        "run",
        tuple({name: None for gang in gangs for name in gang.functions}),
        (),
        (HostFeeds(host, incoming),) if incoming else (),
        tuple(sorted({handle for gang in gangs for handle in gang.handles})),
        (),
        (),
        (),
        peak,
        False,
        {host: tuple(sorted({device for gang in gangs for device in gang.devices[host]}))},
        segments=len(gangs),
        moved=sum(gang.moved for gang in gangs),
    )


def _moved(program: RegisteredProgram, spec: GangSpec) -> int:
    """As `Launch.moved_by`."""
    count = program.arguments
    made = sum(program.values[each.value - count].nbytes for each in spec.makes)
    read = (program.argument_memory[each] for each in spec.handles if each < count)
    return made or sum(nbytes for requirement in read for _, nbytes in requirement)


class _Memory:
    """A run of a program in which only memory is reserved."""

    def __init__(self, program: RegisteredProgram) -> None:
        self._tenant = Tenant(DEFAULT_TENANT)
        self._reservations = Reservations({}, cast(Any, None), cast(Any, None), cast(Any, None))
        entries = [Entry((), 0) for _ in range(program.arguments + len(program.values))]
        self._launch = Launch(0, replace(program, account=Account()), (), (), (), 0, entries)
        self._arguments = program.argument_memory
        self._results = [
            value for value, made in enumerate(program.values, start=program.arguments) if made.result >= 0
        ]

    def run(
        self, gangs: tuple[GangSpec, ...], ahead: int
    ) -> tuple[PartMemory, tuple[PartResult, ...], tuple[int, ...]]:
        """The gangs of an island, on one host: what they need, what is left, which arguments have lost their memory."""
        reservations, entries = self._reservations, self._launch.entries
        ledger = reservations.ledger
        (host,) = gangs[0].hosts
        donors = {}
        for number, requirement in enumerate(self._arguments):
            here = tuple(each for each in requirement if each[0][0] == host and each[1])
            if here:
                block = ledger.take(here)
                entries[number].blocks += (block,)
                donors[id(block)] = number
        before = ledger.used

        def beside(counts: dict[HostDevice, int]) -> dict[HostDevice, int]:
            more = ((device, nbytes - before.get(device, 0)) for device, nbytes in counts.items() if device[0] == host)
            return {device: nbytes for device, nbytes in more if nbytes > 0}

        head: dict[HostDevice, int] = {}
        running: list[Gang[GangRun]] = []
        calls = open_calls = 0
        for spec in gangs:
            if spec.functions:
                while open_calls >= ahead:
                    first = running.pop(0)
                    open_calls -= bool(first.run.spec.functions)
                    reservations.ended(first)
                if calls == ahead:
                    head = beside(ledger.peak)
                calls += 1
                open_calls += 1
            node = QueuedNode[GangRun](0, 0, tenant=self._tenant)
            gang = Gang(0, spec.island, node, GangRun(self._launch, spec, set(spec.hosts)))
            node.gangs = (gang,)
            reservations.reserve(node)
            running.append(gang)
        most, tail = beside(ledger.peak), beside(ledger.used)
        for gang in running:
            reservations.ended(gang)
        results = [
            PartResult(value, block.requirement, donors.get(id(block), -1))
            for value in self._results
            for block in entries[value].blocks
            if block.requirement[0][0][0] == host
        ]
        held = {id(block) for number in donors.values() for block in entries[number].blocks}
        lost = tuple(number for block, number in donors.items() if block not in held)
        left = beside(ledger.used)  # also what nobody drops until the launch is over
        for device, nbytes in total([each.requirement for each in results if each.donor < 0]):
            left[device] = max(nbytes, left.get(device, 0))
        return PartMemory(most, head if calls > ahead else most, tail, left), tuple(results), lost
