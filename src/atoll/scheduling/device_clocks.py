"""For how long gangs keep devices busy: each device runs one after another, in the order in which they were started.

A gang has its devices of a host from its dispatch there, or from when the last of these was free, to its own end, by
the host's clock: as the spans of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Host:
    """When the last gang ended on its devices: on all of `devices` at once, and on others as `ends` has it. `last` is
    the latest of all.
    """

    devices: tuple[int, ...] = ()
    end: int = 0
    last: int = 0
    ends: dict[int, int] = field(default_factory=dict)  # by ordinal


class DeviceClocks:
    """The devices of all hosts. Pure: times are those that hosts report, in nanoseconds."""

    def __init__(self) -> None:
        self._hosts: dict[int, _Host] = {}

    def ended(
        self, hosts: tuple[int, ...], devices: Mapping[int, tuple[int, ...]], times: tuple[int, ...]
    ) -> tuple[int, int]:
        """A gang has ended on these hosts, where it had these devices: how long it had them, summed over all; and how
        long it took on the slowest host, where gangs that run at once share the time, as their ends are reported.

        `times` has for each host its dispatch and its end.
        """
        known, position, found, longest = self._hosts, 0, 0, 0
        for number in hosts:
            started, ended = times[position], times[position + 1]
            position += 2
            its = devices[number]
            host = known.get(number)
            if host is None:
                host = known[number] = _Host(its)
            if ended > host.last:
                took = ended - (started if started > host.last else host.last)
                if took > longest:
                    longest = took
                host.last = ended
            if its == host.devices:  # as the one before: so it is for nearly all
                if ended > host.end:
                    began = started if started > host.end else host.end
                    found += (ended - began) * len(its)
                    host.end = ended
                continue
            self._with(host, its)
            found += max(0, ended - max(started, host.end)) * len(its)
            host.end = max(ended, host.end)
        return found, longest

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
