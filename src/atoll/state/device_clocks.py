"""Compute how long gangs keep devices busy. A device runs gangs one after another, in the order of their dispatch.

On each host, a gang that computes has its devices from its dispatch, or from the end of the gangs before it on these
devices, until its own end, by the host's clock. The spans of a trace are laid out in the same way. Transfers run beside
computations. A transfer that ends during a computation is charged its own time, and the computation the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import mul, sub
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
    """The stored form of the clock of a host: see `_Clocks`."""

    devices: tuple[int, ...] = ()
    end: int = 0
    last: int = 0
    ends: dict[int, int] = field(default_factory=dict)
    moves: list[_Move] = field(default_factory=list)


@dataclass(slots=True)
class _Clocks:
    """The ends of the last computations on the devices of hosts. All fields are by host.

    The hosts of a gang report together, and mostly have nothing but the first three fields, so that all of them can be
    read and changed at once.
    """

    devices: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of the last gang
    end: dict[int, int] = field(default_factory=dict)  # on all of `devices`
    last: dict[int, int] = field(default_factory=dict)  # the latest on any device
    ends: dict[int, dict[int, int]] = field(default_factory=dict)  # on other devices, by ordinal
    moves: dict[int, list[_Move]] = field(default_factory=dict)  # transfers that have ended since
    moving: set[int] = field(default_factory=set)  # hosts with such transfers

    @classmethod
    def of(cls, hosts: Mapping[int, _Host]) -> _Clocks:
        """Return the clocks from their stored form."""
        made = cls()
        for number, host in hosts.items():
            made.add(number, host.devices)
            made.end[number], made.last[number], made.ends[number] = host.end, host.last, host.ends
            made.keep_moves(number, host.moves)
        return made

    def stored(self) -> dict[int, _Host]:
        """Return the stored form."""
        end, last, ends, moves = self.end, self.last, self.ends, self.moves
        return {
            number: _Host(devices, end[number], last[number], ends[number], moves[number])
            for number, devices in self.devices.items()
        }

    def add(self, host: int, devices: tuple[int, ...]) -> None:
        """Add a host of which no gang has ended."""
        self.devices[host] = devices
        self.end[host] = self.last[host] = 0
        self.ends[host], self.moves[host] = {}, []

    def switch(self, host: int, devices: tuple[int, ...]) -> None:
        """Change `devices` and `end` of a host to the devices of the next gang."""
        ends = self.ends[host]
        ends.update(dict.fromkeys(self.devices[host], self.end[host]))
        self.devices[host] = devices
        self.end[host] = max([ends.get(device, 0) for device in devices], default=0)

    def keep_moves(self, host: int, moves: list[_Move]) -> None:
        """Set the transfers of a host."""
        self.moves[host] = moves
        if moves:
            self.moving.add(host)
        else:
            self.moving.discard(host)

    def forget(self, host: int) -> None:
        """Forget a host."""
        for each in (self.devices, self.end, self.last, self.ends, self.moves):
            each.pop(host, None)
        self.moving.discard(host)


class DeviceClocks:
    """The clocks of the devices of all hosts. Times are those that hosts report, in nanoseconds."""

    def __init__(self) -> None:
        self._hosts = _Clocks()

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
          hosts: the hosts of the gang, without repetitions.
          devices: the ordinals of its devices, by host.
          times: for each host, the gang's dispatch and its end.
          computes: whether the gang computes. If not, it is a transfer.
        """
        if len(hosts) == 1:  # most gangs
            return self._ended_on(hosts[0], devices[hosts[0]], times[0], times[1], computes)
        at_once = self._ended_at_once(hosts, devices, times) if computes else None
        if at_once is not None:
            return at_once
        found = longest = 0
        for host, started, ended in zip(hosts, times[::2], times[1::2], strict=True):
            busy, took = self._ended_on(host, devices[host], started, ended, computes)
            found += busy
            longest = max(longest, took)
        return found, longest

    def _ended_on(
        self, host: int, devices: tuple[int, ...], started: int, ended: int, computes: bool
    ) -> tuple[int, int]:
        """Note that a gang has ended on these devices of a host. Return what `ended` returns."""
        clocks, hidden = self._hosts, 0
        if devices != clocks.devices.get(host):  # rare: most gangs have the devices of the gang before
            self._use(host, devices)
        if not computes:
            took = self._moved(host, devices, started, ended)
            return took * len(devices), took
        if clocks.moving and host in clocks.moving:
            started, hidden = self._beside(host, devices, started, ended)
        end, last = clocks.end[host], clocks.last[host]
        if end == last:  # nearly always
            if ended <= end:
                return 0, 0
            clocks.end[host] = clocks.last[host] = ended
            took = ended - (started if started > end else end) - hidden
            return (took * len(devices), took) if took > 0 else (0, 0)
        busy = longest = 0
        if ended > last:
            longest = max(0, ended - max(started, last) - hidden)
            clocks.last[host] = ended
        if ended > end:
            busy = max(0, ended - max(started, end) - hidden) * len(devices)
            clocks.end[host] = ended
        return busy, longest

    def _ended_at_once(
        self, hosts: tuple[int, ...], devices: Mapping[int, tuple[int, ...]], times: tuple[int, ...]
    ) -> tuple[int, int] | None:
        """Note that a gang that computes has ended, at a cost that hardly depends on the number of its hosts.

        Return what `ended` returns. Return None, and note nothing, if one of the hosts has had transfers since its last
        computation, or other devices in it.
        """
        clocks = self._hosts
        its = [*map(devices.__getitem__, hosts)]
        if its != [*map(clocks.devices.get, hosts)] or not clocks.moving.isdisjoint(hosts):
            return None
        starts, ends = times[::2], times[1::2]
        before, last = [*map(clocks.end.__getitem__, hosts)], [*map(clocks.last.__getitem__, hosts)]
        took = [*map(sub, ends, map(max, starts, before))]
        longest = max(took if last == before else map(sub, ends, map(max, starts, last)))
        if min(took) < 0:  # on hosts that have reported a later end
            took = [max(0, each) for each in took]
        clocks.end.update(zip(hosts, map(max, before, ends), strict=True))
        clocks.last.update(zip(hosts, map(max, last, ends), strict=True))
        return sum(map(mul, took, map(len, its))), max(0, longest)

    def _use(self, number: int, devices: tuple[int, ...]) -> None:
        """Note that the next gang of a host has other devices than the last one, or is its first."""
        if number in self._hosts.devices:
            self._hosts.switch(number, devices)
        else:
            self._hosts.add(number, devices)

    def _moved(self, number: int, its: tuple[int, ...], started: int, ended: int) -> int:
        """Note that a transfer has ended. Return its time, less that of known computations and other transfers."""
        clocks = self._hosts
        moves, began = clocks.moves[number], max(started, clocks.end[number])
        for each in [each for each in moves if each.ended > began]:  # mostly none: reads of small arrays are short
            if _meet(each.devices, its):
                began = max(began, each.ended)
        if began >= ended:
            return 0
        clocks.keep_moves(number, [*moves, _Move(started, began, ended, its)][-_MAX_MOVES:])
        return ended - began

    def _beside(self, number: int, its: tuple[int, ...], started: int, ended: int) -> tuple[int, int]:
        """Return when a computation began, after the transfers before it, and the time of transfers since then.

        Forget the transfers that ended before it, for its devices. See `_after`.
        """
        clocks = self._hosts
        began, hidden, left = _after(clocks.moves[number], clocks.end[number], its, started, ended)
        clocks.keep_moves(number, left)
        return began, hidden

    def ended_until(self, number: int, when: int) -> None:
        """Note that gangs have ended on a host, the last of them at time `when`."""
        clocks = self._hosts
        if number not in clocks.devices:
            clocks.add(number, ())
        clocks.last[number] = max(clocks.last[number], when)

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
        clocks = self._hosts
        if clocks.devices.get(number) != devices:
            self._use(number, devices)
        end = clocks.end[number]
        began = max(started, end)
        found = max(0, busy + max(started, free) - began)
        moves = clocks.moves[number]
        if moves:
            moved = _united(each for each in moves if _meet(each.devices, devices))
            hidden = sum([max(0, min(stop, ended) - max(start, began)) for start, stop in moved])
            found = min(found, max(0, ended - began - hidden))
        clocks.end[number] = max(ended, end)
        return found

    def forget(self, host: int) -> None:
        """Forget a host that has restarted, since its clock has restarted as well."""
        self._hosts.forget(host)


def _after(
    known: list[_Move], end: int, its: tuple[int, ...], started: int, ended: int
) -> tuple[int, int, list[_Move]]:
    """Return when a computation began, after the transfers that preceded it on its devices, and the time since then
    that was charged to transfers. Also return the transfers that did not end before it, for these devices.

    A relay may report a transfer before a computation that ended earlier.

    Args:
      known: the transfers.
      end: the end of the computation before this one.
      its: the devices of the computation.
      started: its dispatch.
      ended: its end.
    """
    moves: list[_Move] = []
    left: list[_Move] = []
    for each in known:
        (moves if each.ended <= ended and _meet(each.devices, its) else left).append(each)
    rests = ((each, tuple(sorted({*each.devices} - {*its}))) for each in moves)
    parts = [_Move(each.started, each.began, each.ended, rest) for each, rest in rests if rest]
    began = max([started, *(each.ended for each in moves if each.started <= started)])
    free = max(began, end)
    hidden = sum(each.ended - max(each.began, free) for each in moves if each.ended > free)
    for each in left:
        if each.ended > ended and _meet(each.devices, its):
            hidden += max(0, ended - max(each.began, free))
    return began, hidden, parts + left


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
