"""Which hosts of a session are away, or about to be, as far as its proxy knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from atoll.protocol import messages as m
from atoll.protocol.questions import DevicesAway


class HostAvailability:
    """`lost` are not back yet; `leaving` are on machines that are about to go."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send  # to the controller
        self.lost: set[int] = set()
        self.leaving: set[int] = set()
        self._client_leaves = False  # the controller knows that it does so by itself
        self._losses = 0

    def lose(self, hosts: Iterable[int]) -> None:
        """All hosts of an islands fail at once."""
        self.lost.update(hosts)
        self.leaving.difference_update(hosts)
        self._losses += 1

    def leave(self, hosts: Iterable[int], stay: bool) -> None:
        """They are about to be lost; or they are not, after all."""
        self.leaving = self.leaving.difference(hosts) if stay else self.leaving.union(hosts)

    def come_back(self, hosts: Iterable[int]) -> None:
        self.lost.difference_update(hosts)
        self.leaving.difference_update(hosts)

    def devices(self, hosts: Mapping[int, int], client_leaves: bool) -> DevicesAway:
        """The devices on them, of `hosts`: the host of each device. The controller hears of a client that leaves."""
        if client_leaves and not self._client_leaves:
            self._client_leaves = True
            self._send(m.LeavesIslands())
        return DevicesAway(
            tuple(device for device, host in hosts.items() if host in self.lost),
            tuple(device for device, host in hosts.items() if host in self.leaving),
            self._losses,
        )
