"""Charge and count the gangs of delegated runs that have ended, as if each had been dispatched separately.

A host reports all gangs of its island in one or a few messages, with counts, so there is no work for each gang here.
Gangs are counted one by one only if they do not all have the same devices.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

from atoll.errors import invalid
from atoll.protocol import messages as m
from atoll.state.delegated_parts import DelegatedProgram, IslandPart
from atoll.state.device_clocks import DeviceClocks
from atoll.state.gang_specs import RunGangs
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun
from atoll.state.tallies import BOUNDS, Tallies, Tally, counts_of

_PAIR = 16  # bytes of a segment's start and end

# Records ends for traces, as `launcher.Recorder.record_run`: a run's gang on an island, the gangs that it stands for,
# the sequence number of the program's first gang, the place of the first gang that has ended, and the times from there.
Record = Callable[[Gang[GangRun], RunGangs, int, int, bytes], None]


class DelegatedCharges:
    """Charges and counts the gangs of delegated runs."""

    def __init__(self, tallies: Tallies, clocks: DeviceClocks, record: Record) -> None:
        self._tallies = tallies
        self._clocks = clocks
        self._record = record

    def charge(self, gang: Gang[GangRun], program: DelegatedProgram, first: int, message: m.RunProgress) -> None:
        """Charge the ends of gangs that `gang` stands for. Raise INVALID_ARGUMENT if the report is impossible.

        `first` is the sequence number of the program's first gang.
        """
        part, place = program.parts[gang.island], message.first
        count, rest = divmod(len(message.times), _PAIR)
        if rest:
            raise invalid(f"the times of gang {gang.sequence} have {len(message.times)} bytes, not pairs of {_PAIR}")
        if not 0 <= place <= place + count <= len(part.gangs):
            raise invalid(f"segments {place} to {place + count} of gang {gang.sequence} do not exist")
        tally = self._tallies[gang.island, gang.node.tenant.name]
        if message.ended is not None:
            self._ended(gang, part, message.ended, tally)
        if not count:
            return
        if part.devices is None:
            self._ended_one_by_one(gang, part, place, struct.unpack(f"<{2 * count}q", message.times), tally)
        launch, stop = gang.run.launch, place + count
        if launch.error is None:
            for kind, counts, nbytes in part.transfers:
                if counts[stop] > counts[place]:
                    tally.move(kind, nbytes[stop] - nbytes[place], counts[stop] - counts[place])
            launch.program.account.bytes_moved += part.written[stop] - part.written[place]
        self._record(gang, part.each, first, place, message.times)

    def _ended(self, gang: Gang[GangRun], part: IslandPart, ended: m.GangsEnded, tally: Tally) -> None:
        if len(ended.counts) != len(BOUNDS) + 1:
            raise invalid(f"gang {gang.sequence} has {len(ended.counts)} counts, not {len(BOUNDS) + 1}")
        host, devices = gang.hosts[0], part.devices
        self._clocks.ended_until(host, ended.ended)
        if devices is not None:
            busy = self._clocks.busy_together(host, devices, ended.busy_ns, ended.started, ended.free, ended.ended)
            _count(gang, part, tally, ended.counts, ended.busy_ns, busy * len(devices), ended.samples)

    def _ended_one_by_one(
        self, gang: Gang[GangRun], part: IslandPart, first: int, times: tuple[int, ...], tally: Tally
    ) -> None:
        took, busy = {}, 0
        for place, (started, ended) in enumerate(zip(times[::2], times[1::2], strict=True), first):
            if ended:
                spec = part.gangs[place]
                each, _ = self._clocks.ended(gang.hosts, spec.devices, (started, ended), spec.computes)
                took[place] = each // spec.device_count
                busy += each
        samples = [(place, took[place]) for place in part.samples if place in took]
        _count(gang, part, tally, counts_of(list(took.values())), sum(took.values()), busy, samples)


def _count(
    gang: Gang[GangRun],
    part: IslandPart,
    tally: Tally,
    counts: Sequence[int],
    nanoseconds: int,
    busy: int,
    samples: Iterable[tuple[int, int]],
) -> None:
    """Count gangs of the part that have ended. `busy` is their device time; `Tally.ended_all` explains the others."""
    own = gang.run
    own.device_ns += busy
    account = own.launch.program.account
    account.device_ns += busy
    if account.is_idle:
        account.wake()
    specs, known = part.gangs, part.samples
    for place, took in samples:
        if place in known:
            specs[place].observe(took)
    tally.ended_all(sum([seconds for _, seconds in own.waited]), counts, nanoseconds, busy)
