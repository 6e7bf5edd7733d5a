"""Which hosts of a session are away, or about to be, as far as its proxy knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.protocol.questions import DevicesAway


class HostsAway:
    """`lost` are not back yet; `leaving` are on machines that are about to go."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.leaving: set[int] = set()
        self._losses = 0

    def lose(self, hosts: Iterable[int]) -> None:
        """All hosts of an island are lost at once."""
        self.lost.update(hosts)
        self.leaving.difference_update(hosts)
        self._losses += 1

    def devices(self, hosts: Mapping[int, int]) -> DevicesAway:
        """The devices on them, of `hosts`: the host of each device."""
        return DevicesAway(
            tuple(device for device, host in hosts.items() if host in self.lost),
            tuple(device for device, host in hosts.items() if host in self.leaving),
            self._losses,
        )
