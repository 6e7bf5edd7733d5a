"""Charge the usage of long gangs once a second while they run, since otherwise it would appear all at once.

The device time of a gang is known when it has ended. Until then, the gang is charged for each device for which it was
the first in line at two ticks in a row. These charges are settled when the gang ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.cluster.locations import HostDevice
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun


class LongGangs:
    """Charges gangs that run for longer than a second."""

    def __init__(self) -> None:
        self._heads: set[tuple[int, HostDevice]] = set()  # at the last tick: gangs, and devices where they were first
        self._known: set[int] = set()  # gangs in flight at the last tick
        self._last = 0.0

    def tick(self, now: float, in_flight: Mapping[int, Gang[GangRun]]) -> None:
        """Charge the gangs in flight, which are in the order in which they were started."""
        nanoseconds, self._last = round((now - self._last) * 1e9), now
        known, self._known = self._known, set(in_flight)
        heads: set[tuple[int, HostDevice]] = set()
        if not known.isdisjoint(self._known):
            taken: set[HostDevice] = set()
            for sequence, gang in in_flight.items():
                self._charge(sequence, gang, taken, heads, nanoseconds)
        self._heads = heads

    def _charge(
        self,
        sequence: int,
        gang: Gang[GangRun],
        taken: set[HostDevice],
        heads: set[tuple[int, HostDevice]],
        nanoseconds: int,
    ) -> None:
        run = gang.run
        # A host call uses no device. Hosts report the progress of a delegated run.
        if run.spec.host_call or gang.node.is_delegated:
            return
        for device in _devices(run.spec.devices, run.hosts_left):
            if device in taken:
                continue
            taken.add(device)
            heads.add((sequence, device))
            if (sequence, device) in self._heads:  # it has had the device since the last tick
                run.advance_ns += nanoseconds
                account = run.launch.program.account
                account.device_ns += nanoseconds
                if account.is_idle:
                    account.wake()


def settled(run: GangRun, device_ns: int) -> int:
    """Return how much of a gang's device time on some of its hosts is still to be charged. Settle the rest.

    `GangCharges.ended` settles what is left when the gang has ended on all hosts.
    """
    settled = min(run.advance_ns, device_ns)
    run.advance_ns -= settled
    return device_ns - settled


def _devices(devices: Mapping[int, tuple[int, ...]], hosts: Iterable[int]) -> Iterable[HostDevice]:
    return ((host, ordinal) for host in sorted(hosts) for ordinal in devices[host])
