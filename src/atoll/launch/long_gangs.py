"""Usage of gangs that take longer than a second, charged while they run: else it would appear all at once.

What they took is known once they end. Until then a gang is charged for each device for which it was the first in line
all the time between two looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.cluster.locations import HostDevice
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun


class LongGangs:
    """Charges gangs while they run that take longer than a second; what they took is known once they end."""

    def __init__(self) -> None:
        self._heads: set[tuple[int, HostDevice]] = set()  # gangs, and the devices that they were the first in line for
        self._known: set[int] = set()  # that were in flight the last time
        self._last = 0.0

    def tick(self, now: float, in_flight: Mapping[int, Gang[GangRun]]) -> None:
        """These are in flight now, in the order in which they were started."""
        nanoseconds, self._last = round((now - self._last) * 1e9), now
        known, self._known = self._known, set(in_flight)
        heads: set[tuple[int, HostDevice]] = set()
        if not known.isdisjoint(self._known):
            taken: set[HostDevice] = set()
            for sequence, gang in in_flight.items():
                self._look_at(sequence, gang, taken, heads, nanoseconds)
        self._heads = heads

    def _look_at(
        self,
        sequence: int,
        gang: Gang[GangRun],
        taken: set[HostDevice],
        heads: set[tuple[int, HostDevice]],
        nanoseconds: int,
    ) -> None:
        run = gang.run
        if run.spec.host_call or gang.node.is_delegated:  # hosts report what of it has ended
            return
        for device in _devices(run.spec.devices, run.hosts_left):
            if device in taken:
                continue
            taken.add(device)
            heads.add((sequence, device))
            if (sequence, device) in self._heads:  # it has had the device ever since
                run.advance_ns += nanoseconds
                account = run.launch.program.account
                account.device_ns += nanoseconds
                if account.is_idle:
                    account.wake()


def settled(run: GangRun, device_ns: int) -> int:
    """What of a gang's device time on some of its hosts is yet to be charged."""
    settled = min(run.advance_ns, device_ns)
    run.advance_ns -= settled
    return device_ns - settled


def _devices(devices: Mapping[int, tuple[int, ...]], hosts: Iterable[int]) -> Iterable[HostDevice]:
    return ((host, ordinal) for host in sorted(hosts) for ordinal in devices[host])
