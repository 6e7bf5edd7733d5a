"""For how long gangs keep devices busy: each device runs one after another, in the order in which they were started.

A gang that computes has its devices of a host from its dispatch there, or from when the last of these was free, to its
own end, by the host's clock: as the spans of a trace. Transfers go on beside what computes: one that ends meanwhile has
its own time and no more, and the rest stays with what computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# So many transfers are remembered that have ended since something was computed. What overlaps older ones counts twice.
_MOST_MOVES = 64


class _Move(NamedTuple):
    """A transfer that has ended: its dispatch, from when it was counted, and its end."""

    started: int
    began: int
    ended: int
    devices: tuple[int, ...]


@dataclass(slots=True)
class _Host:
    """When what computes ended last on its devices: on all of `devices` at once, and on others as `ends` has it. `last`
    is the latest of all. `moves` are transfers that have ended since.
    """

    devices: tuple[int, ...] = ()
    end: int = 0
    last: int = 0
    ends: dict[int, int] = field(default_factory=dict)  # by ordinal
    moves: list[_Move] = field(default_factory=list)


class DeviceClocks:
    """The devices of all hosts. Pure: times are those that hosts report, in nanoseconds."""

    def __init__(self) -> None:
        self._hosts: dict[int, _Host] = {}

    def ended(
        self,
        hosts: tuple[int, ...],
        devices: Mapping[int, tuple[int, ...]],
        times: tuple[int, ...],
        computes: bool = True,
    ) -> tuple[int, int]:
        """A gang has ended on these hosts, where it had these devices: how long it had them, summed over all; and how
        long it took on the slowest host, where gangs that run at once share the time, as their ends are reported.

        `times` has for each host its dispatch and its end. One that does not compute is a transfer.
        """
        known, position, found, longest = self._hosts, 0, 0, 0
        for number in hosts:
            started, ended = times[position], times[position + 1]
            position += 2
            its = devices[number]
            host = known.get(number)
            if host is None:
                host = known[number] = _Host(its)
            if its != host.devices:  # nearly always they are those of the one before
                self._with(host, its)
            if not computes:
                took = self._moved(host, its, started, ended)
                longest = max(longest, took)
                found += took * len(its)
                continue
            if host.moves:
                started, hidden = _beside(host, its, started, ended)
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
        """A transfer has ended: what it took beside what is known to have computed, and other transfers."""
        began = max(started, host.end, max((each.ended for each in host.moves if _meet(each.devices, its)), default=0))
        if began >= ended:
            return 0
        host.moves.append(_Move(started, began, ended, its))
        if len(host.moves) > _MOST_MOVES:
            del host.moves[0]
        return ended - began

    def ended_until(self, number: int, when: int) -> None:
        """Gangs have ended on a host, the last of them then."""
        host = self._hosts.setdefault(number, _Host())
        host.last = max(host.last, when)

    def busy_together(
        self, number: int, devices: tuple[int, ...], busy: int, started: int, free: int, ended: int
    ) -> int:
        """Gangs have ended one after another on a host, all with these devices: how long they had them.

        The host has counted `busy` from when they were `free`, as far as it knew, or the first one `started`.
        """
        host = self._hosts.get(number)
        if host is None or host.devices != devices:
            host = self._hosts[number] = self._with(host or _Host(devices), devices)
        found = max(0, busy + max(started, free) - max(started, host.end))
        host.end = max(ended, host.end)
        return found

    def _with(self, host: _Host, devices: tuple[int, ...]) -> _Host:
        """A host whose last gangs had other devices, for some that have these."""
        host.ends.update(dict.fromkeys(host.devices, host.end))
        last = max((host.ends.get(device, 0) for device in devices), default=0)
        host.devices, host.end = devices, last
        return host

    def forget(self, host: int) -> None:
        """It has started anew, and so has its clock."""
        self._hosts.pop(host, None)


def _beside(host: _Host, its: tuple[int, ...], started: int, ended: int) -> tuple[int, int]:
    """When a gang began that has computed on these devices, after the transfers that were there before it; and for how
    long others were counted meanwhile.
    """
    moves: list[_Move] = []
    left: list[_Move] = []
    for each in host.moves:
        (moves if each.ended <= ended and _meet(each.devices, its) else left).append(each)
    host.moves = left
    began = max([started, *(each.ended for each in moves if each.started <= started)])
    free = max(began, host.end)
    return began, sum(each.ended - max(each.began, free) for each in moves if each.ended > free)


def _meet(some: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return some == others or not set(some).isdisjoint(others)
