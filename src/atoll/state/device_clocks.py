"""Compute how long gangs keep devices busy. A device runs gangs one after another, in the order of their dispatch.

On each host, a gang that computes has its devices from its dispatch, or from the end of the gangs before it on these
devices, until its own end, by the host's clock. The spans of a trace are laid out in the same way. Transfers run beside
computations. A transfer that ends during a computation is charged its own time, and the computation the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# Transfers that are remembered per host since its last computation. Time that overlaps older ones is charged twice.
_MAX_MOVES = 64


class _Move(NamedTuple):
    """A transfer that has ended."""

    started: int  # its dispatch
    began: int  # start of the time that it was charged for
    ended: int
    devices: tuple[int, ...]


@dataclass(slots=True)
class _Host:
    """The ends of the last computations on the devices of a host."""

    devices: tuple[int, ...] = ()  # of the last gang
    end: int = 0  # on all of `devices`
    last: int = 0  # the latest on any device
    ends: dict[int, int] = field(default_factory=dict)  # on other devices, by ordinal
    moves: list[_Move] = field(default_factory=list)  # transfers that have ended since


class DeviceClocks:
    """The clocks of the devices of all hosts. Times are those that hosts report, in nanoseconds.

    Unless `is_exact`, as in earlier versions, delegated runs are charged again for time of transfers, and so are
    computations after one that had only some of the devices of a transfer.
    """

    def __init__(self, is_exact: bool = True) -> None:
        self._is_exact = is_exact
        self._hosts: dict[int, _Host] = {}

    def ended(
        self,
        hosts: tuple[int, ...],
        devices: Mapping[int, tuple[int, ...]],
        times: tuple[int, ...],
        computes: bool = True,
    ) -> tuple[int, int]:
        """Note that a gang has ended. Return its time summed over its devices, and its time on the slowest host.

        Gangs that run at the same time on different devices of a host share the latter, in the order in which their
        ends are reported.

        Args:
          hosts: the hosts of the gang.
          devices: the ordinals of its devices, by host.
          times: for each host, the gang's dispatch and its end.
          computes: whether the gang computes. If not, it is a transfer.
        """
        known, found, longest = self._hosts, 0, 0
        # Most gangs have one host.
        ends = (hosts + times,) if len(hosts) == 1 else zip(hosts, times[::2], times[1::2], strict=True)
        for number, started, ended in ends:
            its = devices[number]
            host = known.get(number)
            if host is None:
                host = known[number] = _Host(its)
            if its != host.devices:  # rare: most gangs have the devices of the gang before
                self._switch(host, its)
            if not computes:
                took = self._moved(host, its, started, ended)
                longest = max(longest, took)
                found += took * len(its)
                continue
            if host.moves:
                started, hidden = _beside(host, its, started, ended, self._is_exact)
            else:
                hidden = 0
            if ended > host.last:
                took = ended - (started if started > host.last else host.last) - hidden
                if took > longest:
                    longest = took
                host.last = ended
            if ended > host.end:
                took = ended - (started if started > host.end else host.end) - hidden
                if took > 0:
                    found += took * len(its)
                host.end = ended
        return found, longest

    def _moved(self, host: _Host, its: tuple[int, ...], started: int, ended: int) -> int:
        """Note that a transfer has ended. Return its time, less that of known computations and other transfers."""
        began = max(started, host.end)
        for each in [each for each in host.moves if each.ended > began]:  # mostly none: reads of small arrays are short
            if _meet(each.devices, its):
                began = max(began, each.ended)
        if began >= ended:
            return 0
        host.moves.append(_Move(started, began, ended, its))
        if len(host.moves) > _MAX_MOVES:
            del host.moves[0]
        return ended - began

    def ended_until(self, number: int, when: int) -> None:
        """Note that gangs have ended on a host, the last of them at time `when`."""
        host = self._hosts.setdefault(number, _Host())
        host.last = max(host.last, when)

    def busy_together(
        self, number: int, devices: tuple[int, ...], busy: int, started: int, free: int, ended: int
    ) -> int:
        """Note that gangs have ended one after another on the same devices of a host. Return the time per device.

        The host does not know of other sessions' transfers. Time that was charged to these is not charged again, and
        counts as time in which the gangs did not use the devices as long as there is such time.

        Args:
          number: the host.
          devices: the ordinals of the devices.
          busy: the time that the host has counted.
          started: the dispatch of the first gang.
          free: when the devices were free before, as far as the host knew.
          ended: the end of the last gang.
        """
        host = self._hosts.get(number)
        if host is None or host.devices != devices:
            host = self._hosts.setdefault(number, _Host(devices))
            self._switch(host, devices)
        began = max(started, host.end)
        found = max(0, busy + max(started, free) - began)
        if host.moves and self._is_exact:
            moved = _united(each for each in host.moves if _meet(each.devices, devices))
            hidden = sum([max(0, min(end, ended) - max(start, began)) for start, end in moved])
            found = min(found, max(0, ended - began - hidden))
        host.end = max(ended, host.end)
        return found

    def _switch(self, host: _Host, devices: tuple[int, ...]) -> None:
        """Change `devices` and `end` of a host to the devices of the next gang."""
        host.ends.update(dict.fromkeys(host.devices, host.end))
        last = max((host.ends.get(device, 0) for device in devices), default=0)
        host.devices, host.end = devices, last

    def forget(self, host: int) -> None:
        """Forget a host that has restarted, since its clock has restarted as well."""
        self._hosts.pop(host, None)


def _beside(host: _Host, its: tuple[int, ...], started: int, ended: int, is_exact: bool) -> tuple[int, int]:
    """Return when a computation began, after the transfers that preceded it on its devices, and the time since then
    that was charged to transfers. Forget the transfers that ended before it, for these devices.

    A relay may report a transfer before a computation that ended earlier.
    """
    moves: list[_Move] = []
    left: list[_Move] = []
    for each in host.moves:
        (moves if each.ended <= ended and _meet(each.devices, its) else left).append(each)
    host.moves = left
    if is_exact:
        rests = ((each, tuple(sorted({*each.devices} - {*its}))) for each in moves)
        host.moves = [_Move(each.started, each.began, each.ended, rest) for each, rest in rests if rest] + left
    began = max([started, *(each.ended for each in moves if each.started <= started)])
    free = max(began, host.end)
    hidden = sum(each.ended - max(each.began, free) for each in moves if each.ended > free)
    for each in left:
        if each.ended > ended and _meet(each.devices, its):
            hidden += max(0, ended - max(each.began, free))
    return began, hidden


def _united(moves: Iterable[_Move]) -> list[tuple[int, int]]:
    """Return the disjoint intervals for which transfers were charged on any device."""
    found: list[tuple[int, int]] = []
    for began, ended in sorted([(each.began, each.ended) for each in moves]):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((began, ended))
    return found


def _meet(some: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return some == others or not set(some).isdisjoint(others)
