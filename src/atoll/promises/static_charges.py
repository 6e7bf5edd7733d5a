"""What ends of a static run's gangs are charged and counted for: what each would have been that ended by itself.

All gangs of an island come in one message, or a few: what is done for each is a step of a loop over numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from atoll.errors import invalid
from atoll.promises.static_programs import StaticProgram
from atoll.scheduling.device_clocks import DeviceClocks
from atoll.scheduling.gangs import RunGangs
from atoll.scheduling.session import GangRun
from atoll.scheduling.tallies import Tallies
from atoll.scheduling.tickets import Gang

_TRIPLE = 24  # bytes of a segment's times

# Records ends: a gang, those that it stands for, the sequence number of the program's first one, and times.
Record = Callable[[Gang[GangRun], RunGangs, int, tuple[int, ...]], None]


class StaticCharges:
    """`last_ends` are those of each host's last gang, by its own clock."""

    def __init__(self, tallies: Tallies, clocks: DeviceClocks, last_ends: dict[int, int], record: Record) -> None:
        self._tallies = tallies
        self._clocks = clocks
        self._last_ends = last_ends
        self._record = record

    def charge(self, gang: Gang[GangRun], program: StaticProgram, first: int, packed: bytes) -> None:
        """Gangs that this one stands for have ended, as `RunProgress` has it.

        Raises INVALID_ARGUMENT for what no worker reports.
        """
        if len(packed) % _TRIPLE:
            raise invalid(f"gang {gang.sequence} has times of {len(packed)} bytes")
        times = struct.unpack(f"<{len(packed) // 8}q", packed)
        part = program.parts[gang.island]
        (host,), own, launch = gang.hosts, gang.run, gang.run.launch
        places, starts, ends = times[::3], times[1::3], times[2::3]
        if not 0 <= min(places) <= max(places) < len(part.gangs):
            raise invalid(f"gang {gang.sequence} has no such segments")
        if part.devices is not None:
            took = self._clocks.busy_in_order(host, part.devices, starts, ends)
            busy = sum(took) * len(part.devices)
        else:
            took, busy = [], 0
            for place, started, ended in zip(places, starts, ends, strict=True):
                spec = part.gangs[place]
                each = self._clocks.busy(gang.hosts, spec.devices, (started, ended))
                took.append(each // spec.device_count)
                busy += each
        self._last_ends[host] = max(self._last_ends.get(host, 0), max(ends))
        own.device_ns += busy
        account = launch.program.account
        account.device_ns += busy
        if account.is_idle:
            account.wake()
        for place in part.lessons:
            if place in places:
                part.gangs[place].learn(took[places.index(place)])
        tally = self._tallies[gang.island, gang.ticket.tenant.name]
        tally.ended_all(sum(seconds for _, seconds in own.waited), took, busy)
        if len(places) == len(part.gangs):  # all at once
            for transferred in part.transferred:
                tally.move(*transferred)
            account.bytes_moved += part.whole.moved
        else:
            for kind, moved in part.transfers.items():
                of_kind = [nbytes for nbytes in map(moved.__getitem__, places) if nbytes >= 0]
                if of_kind:
                    tally.move(kind, sum(of_kind), len(of_kind))
            account.bytes_moved += sum(map(part.written.__getitem__, places))
        self._record(gang, part.each, first, times)
