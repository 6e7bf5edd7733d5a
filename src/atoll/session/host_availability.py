"""The hosts that a session has lost, or is about to lose, as its proxy knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from atoll.protocol import messages as m
from atoll.protocol.questions import DevicesAway


class HostAvailability:
    """The hosts of a session that have `failed` as far as the proxy knows, and those `leaving` with their machines.

    The controller has the state of islands, and its messages change this record. The proxy confirms each failure with
    `FailureAcknowledged`.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send  # to the controller
        self.failed: set[int] = set()
        self.leaving: set[int] = set()
        self._client_leaves = False  # whether the controller knows that the client leaves islands itself
        self.losses = 0

    def hosts_failed(self, hosts: Iterable[int]) -> None:
        """Note the failure of hosts. All hosts of an island fail together."""
        self.failed.update(hosts)
        self.leaving.difference_update(hosts)
        self.losses += 1

    def leave(self, hosts: Iterable[int], stay: bool) -> None:
        """Note that hosts are about to fail or, if `stay`, that they will stay after all."""
        self.leaving = self.leaving.difference(hosts) if stay else self.leaving.union(hosts)

    def restarted(self, hosts: Iterable[int]) -> None:
        self.failed.difference_update(hosts)
        self.leaving.difference_update(hosts)

    def devices(self, hosts: Mapping[int, int], client_leaves: bool) -> DevicesAway:
        """Return the affected devices of `hosts` (device to host). Tell the controller if the client leaves."""
        if client_leaves and not self._client_leaves:
            self._client_leaves = True
            self._send(m.LeavesIslands())
        return DevicesAway(
            tuple(device for device, host in hosts.items() if host in self.failed),
            tuple(device for device, host in hosts.items() if host in self.leaving),
            self.losses,
        )
