"""Charge and count gangs: their device time, their bytes and their durations, by tenant, program and island.

The hosts of most gangs report each end. The host of a delegated run reports many ends in one message, as sums, so there
is no work for each gang here. Such gangs are charged one by one only if they do not all have the same devices.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Protocol

from atoll.errors import invalid
from atoll.launch.long_gangs import settled
from atoll.protocol import messages as m
from atoll.state.delegated_parts import DelegatedProgram, IslandPart
from atoll.state.device_clocks import DeviceClocks
from atoll.state.ended_gangs import EndedGangs
from atoll.state.gang_specs import RunGangs
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun
from atoll.state.tallies import BOUNDS, TRANSFERS, Tallies, Tally
from atoll.state.usage import Account

_PAIR = 16  # bytes of a segment's start and end
# Sets of islands and tenants with a tally of their own for joint gangs.
_MAX_JOINT = 64


class GangRecorder(Protocol):
    """Records the ends of gangs, for traces."""

    def record_gang(self, gang: Gang[GangRun], hosts: tuple[int, ...], times: tuple[int, ...]) -> None:
        """Record the end of a gang on some of its hosts, with its start and its end on each."""

    def record_run(self, gang: Gang[GangRun], gangs: RunGangs, first: int, position: int, packed: bytes) -> None:
        """Record the ends of gangs of a delegated run.

        Args:
          gang: the run's gang on an island.
          gangs: the gangs that it stands for.
          first: the sequence number of the program's first gang.
          position: the position of the first gang that has ended.
          packed: the start and the end of each gang from there.
        """

    def clock_began(self, host: int) -> None:
        """Note that the host has restarted, and its clock with it."""


class GangCharges:
    """Charges and counts the gangs of all islands."""

    def __init__(self, trace: GangRecorder) -> None:
        self.tallies = Tallies()
        self.joint: dict[tuple[tuple[int, ...], str], Tally] = {}  # of joint gangs, by their islands and tenant
        self.clocks = DeviceClocks()
        self._trace = trace

    def host_restarted(self, host: int) -> None:
        """Note that a host has restarted, and its clock with it."""
        self.clocks.forget(host)
        self._trace.clock_began(host)

    # ---- gangs whose hosts report each end

    def started(self, gang: Gang[GangRun], seconds: float) -> None:
        """Count the start of a gang, whose launch has waited for this time."""
        tenant = gang.node.tenant.name
        tally = gang.run.tally = (
            self._joint(gang.islands, tenant) if gang.islands else self.tallies[gang.island, tenant]
        )
        tally.waited.observe(seconds)

    def parts_ended(self, gang: Gang[GangRun], hosts: tuple[int, ...], times: tuple[int, ...]) -> None:
        """Charge the time that hosts of a gang have reported: for each host, its dispatch there and its end."""
        self._trace.record_gang(gang, hosts, times)
        run = gang.run
        spec = run.spec
        if spec.host_call:
            return
        busy, longest = self.clocks.ended(hosts, spec.devices, times, spec.computes)
        if longest > run.duration:
            run.duration = longest
        _charge(run, busy, settled(run, busy) if run.advance_ns else busy)

    def ended(self, gang: Gang[GangRun]) -> None:
        """Count the end of a gang that was started. If its launch has no error, the gang has ended well."""
        run = gang.run
        launch, spec, tally = run.launch, run.spec, run.tally
        is_well = launch.error is None
        if run.advance_ns:
            self._settle(run)
        if is_well:
            spec.observe(run.duration)
            if spec.moved or run.rows:
                launch.program.account.bytes_moved += spec.moved + run.received
        if tally is not None:
            tally.ended(run.duration, run.device_ns, is_well)
            if is_well and spec.kind in TRANSFERS:
                tally.move(spec.kind, run.moved(spec.hosts))

    def withdrawn(self, gang: Gang[GangRun]) -> None:
        """Count a gang that was lost before it had run on its hosts."""
        run = gang.run
        if run.advance_ns:
            self._settle(run)
        if run.tally is not None:
            run.tally.ended(0, run.device_ns, False)

    def _settle(self, run: GangRun) -> None:
        """Take back what an ended gang was charged in advance and has not used: it waited on its hosts, or was lost.

        The time of a gang that had to be stopped stays charged, since its hosts have reported that it ran.
        """
        if run.overran:
            run.device_ns += run.advance_ns
        else:
            _add(run.launch.program.account, -run.advance_ns)
        run.advance_ns = 0

    # ---- tallies

    def by_island(self) -> Mapping[tuple[int, str], Tally]:
        """Return the tallies by island and tenant. A joint gang counts on each of its islands.

        They may be the present tallies: read them before the next event.
        """
        return self.tallies.with_joint(self.joint) if self.joint else self.tallies

    def _joint(self, islands: tuple[int, ...], tenant: str) -> Tally:
        tally = self.joint.get((islands, tenant))
        if tally is None:
            if len(self.joint) >= _MAX_JOINT:
                self._divide_idle()
            tally = self.joint[islands, tenant] = Tally()
        return tally

    def _divide_idle(self) -> None:
        """Divide the joint tallies without gangs in flight among their islands."""
        for key, tally in list(self.joint.items()):
            if not tally.running:
                self.tallies.add(*key, tally)
                del self.joint[key]

    # ---- gangs of delegated runs

    def progressed(self, gang: Gang[GangRun], program: DelegatedProgram, first: int, message: m.RunProgress) -> None:
        """Charge the ends of gangs that `gang` stands for. Raise INVALID_ARGUMENT if the report is impossible.

        `first` is the sequence number of the program's first gang.
        """
        part, position = program.parts[gang.island], message.first
        count, rest = divmod(len(message.times), _PAIR)
        if rest:
            raise invalid(f"the times of gang {gang.sequence} have {len(message.times)} bytes, not pairs of {_PAIR}")
        if not 0 <= position <= position + count <= len(part.gangs):
            raise invalid(f"segments {position} to {position + count} of gang {gang.sequence} do not exist")
        ended, host = message.ended, gang.hosts[0]
        if ended is not None:
            if len(ended.counts) != len(BOUNDS) + 1:
                raise invalid(f"gang {gang.sequence} has {len(ended.counts)} counts, not {len(BOUNDS) + 1}")
            self.clocks.ended_until(host, ended.ended)
            if part.devices is not None:
                busy = self.clocks.busy_together(
                    host, part.devices, ended.busy_ns, ended.started, ended.free, ended.ended
                )
                self._count(gang, part, ended, busy * len(part.devices))
        if not count:
            return
        if part.devices is None:
            self._one_by_one(gang, part, position, struct.unpack(f"<{2 * count}q", message.times))
        launch, stop = gang.run.launch, position + count
        if launch.error is None:
            tally = self.tallies[gang.island, gang.node.tenant.name]
            for kind, counts, nbytes in part.transfers:
                if counts[stop] > counts[position]:
                    tally.move(kind, nbytes[stop] - nbytes[position], counts[stop] - counts[position])
            launch.program.account.bytes_moved += part.written[stop] - part.written[position]
        self._trace.record_run(gang, part.each, first, position, message.times)

    def _one_by_one(self, gang: Gang[GangRun], part: IslandPart, first: int, times: tuple[int, ...]) -> None:
        ended_gangs, busy = EndedGangs(0, 0), 0
        for position, (started, ended) in enumerate(zip(times[::2], times[1::2], strict=True), first):
            if ended:
                spec = part.gangs[position]
                each, _ = self.clocks.ended(gang.hosts, spec.devices, (started, ended), spec.computes)
                ended_gangs.add(position, ended, each // spec.device_count, position in part.samples)
                busy += each
        self._count(gang, part, ended_gangs.counted(), busy)

    def _count(self, gang: Gang[GangRun], part: IslandPart, ended: m.GangsEnded, busy: int) -> None:
        """Count gangs of the part that have ended. `busy` is their time, summed over devices."""
        _charge(gang.run, busy, busy)
        for position, took in ended.samples:
            if position in part.samples:
                part.gangs[position].observe(took)
        waited = sum([seconds for _, seconds in gang.run.waited])
        self.tallies[gang.island, gang.node.tenant.name].ended_all(waited, ended.counts, ended.busy_ns, busy)


def _charge(run: GangRun, busy: int, uncharged: int) -> None:
    """Add device time of a gang, in nanoseconds. A part of it may have been charged to the account in advance."""
    run.device_ns += busy
    account = run.launch.program.account
    account.device_ns += uncharged  # as `_add`, without a call for each gang
    if account.is_idle:
        account.wake()


def _add(account: Account, nanoseconds: int) -> None:
    account.device_ns += nanoseconds
    if account.is_idle:
        account.wake()
