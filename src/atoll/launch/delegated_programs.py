"""Find whether runs of a program may be delegated (see `delegated_runs`), and what is known of them before any run.

The memory of a part is found by letting the gangs reserve theirs on devices without limits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, cast

import msgspec

from atoll.cluster.locations import HostDevice, MemoryRequirement, total
from atoll.cluster.tenant_settings import DEFAULT_TENANT
from atoll.launch.reservations import Reservations
from atoll.state.buffer_directory import Entry
from atoll.state.delegated_parts import DelegatedProgram, IslandPart, PartMemory, PartResult, Transfers
from atoll.state.gang_specs import GangSpec, HostFeeds, RunGangs
from atoll.state.programs import RegisteredProgram
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.session import GangRun, Launch
from atoll.state.tallies import TRANSFERS
from atoll.state.tenants import Tenant
from atoll.state.usage import Account

# Delegation gains nothing for programs with fewer nodes.
MIN_NODES = 4
# Kinds of gangs that a delegated run may have. They need only devices and other hosts, and report only their ends.
_KINDS = frozenset({"call", "move", "send", "receive"})


def delegated_program(
    program: RegisteredProgram, hosts_of: Callable[[int], int], ahead: int, weight: int
) -> DelegatedProgram | None:
    """Return the delegated program, or None if its runs cannot be delegated. `hosts_of(island)` counts hosts."""
    if len(program.islands) < 2 or len(program.nodes) < MIN_NODES or program.is_unbounded or program.reports:
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
        positions = []
        for gang in node:
            positions.append((gang.island, len(by_island[gang.island])))
            by_island[gang.island].append(number + len(positions) - 1)
        first += [number] * len(node)
        number += len(node)
        if len(node) > 1:
            nodes.append(tuple(positions))
    memory = _Memory(program)
    parts = {}
    for island, numbers in by_island.items():
        specs = tuple(gangs[each] for each in numbers)
        needs, results, lost = memory.run(specs, ahead)
        of_host = {devices for spec in specs for devices in spec.devices.values()}
        moved = tuple(_moved(program, spec) if spec.kind in TRANSFERS else 0 for spec in specs)
        devices = next(iter(of_host)) if len(of_host) == 1 else None
        last = {id(spec.duration_estimate): position for position, spec in enumerate(specs) if spec.functions}
        count = Counter(id(spec.duration_estimate) for spec in specs if spec.functions)
        samples = {position: count[which] for which, position in last.items()}
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
        whole = _whole(specs, tuple(sorted(needs.peak.items())))
        successor = dataclasses.replace(whole, scratch=needs.behind(needs))
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
    """Return the bytes that a gang moves, as `Launch.moved_by` does."""
    count = program.arguments
    made = sum(program.values[each.value - count].nbytes for each in spec.makes)
    read = (program.argument_memory[each] for each in spec.handles if each < count)
    return made or sum(nbytes for requirement in read for _, nbytes in requirement)


class _Memory:
    """A simulated run of a program, which only reserves memory."""

    def __init__(self, program: RegisteredProgram) -> None:
        self._tenant = Tenant(DEFAULT_TENANT)
        self._reservations = Reservations({}, cast(Any, None), cast(Any, None), cast(Any, None))
        entries = [Entry((), 0) for _ in range(program.arguments + len(program.values))]
        self._launch = Launch(0, msgspec.structs.replace(program, account=Account()), (), (), (), 0, entries)
        self._arguments = program.argument_memory
        self._results = [
            value for value, made in enumerate(program.values, start=program.arguments) if made.result >= 0
        ]

    def run(
        self, gangs: tuple[GangSpec, ...], ahead: int
    ) -> tuple[PartMemory, tuple[PartResult, ...], tuple[int, ...]]:
        """Simulate the gangs of an island with one host. Return their memory, their results, and the lost arguments."""
        reservations, entries = self._reservations, self._launch.entries
        ledger = reservations.ledger
        (host,) = gangs[0].hosts
        donors = {}
        for number, requirement in enumerate(self._arguments):
            here = tuple(each for each in requirement if each[0][0] == host and each[1])
            if here:
                block = ledger.take(here)
                entries[number].blocks.add(block)
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
        left = beside(ledger.used)  # includes values that no gang drops before the end of the launch
        for device, nbytes in total([each.requirement for each in results if each.donor < 0]):
            left[device] = max(nbytes, left.get(device, 0))
        return PartMemory(most, head if calls > ahead else most, tail, left), tuple(results), lost
