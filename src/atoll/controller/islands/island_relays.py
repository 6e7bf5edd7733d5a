"""Groups of hosts, each with a relay: how they are made, and what the relays report.

A group belongs to one incarnation of its island, and is lost with it: no host of an island goes on without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.cluster.lifecycle import IslandFailed
from atoll.controller.state import ClusterState
from atoll.dispatch.launcher import Launcher
from atoll.protocol import messages as m


class Relays:
    """`size` is that of a group; 0: there are none."""

    def __init__(self, state: ClusterState, launcher: Launcher, size: int) -> None:
        self.broken: dict[int, str] = {}  # islands in which two hosts of a group cannot reach each other, and which
        self._resources = state.resources
        self._outbox = state.outbox
        self._launcher = launcher
        self._size = size
        self._islands: set[int] = set()  # that have their groups
        self.handlers: dict[type[Any], Any] = {
            m.Gathered: self._gathered,
            m.MemberFailed: self._failed,
            m.LinkLost: self._link_lost,
        }

    def form(self) -> None:
        """Islands of which all hosts are there, and know of each other, get their groups."""
        for island, record in self._resources.islands.items():
            if record.works and island not in self._islands and self._resources.has_all_hosts(island):
                self._islands.add(island)
                for hosts in relay_groups(self._resources.hosts_of(island), self._size):
                    self._outbox.form_group(hosts)

    def island_failed(self, lost: IslandFailed) -> None:
        self._islands.discard(lost.island)
        self.broken.pop(lost.island, None)

    # ---- messages

    def _gathered(self, host: int, message: m.Gathered) -> None:
        for unit in message.units:
            self._launcher.runs_ended(unit.hosts, unit.sequence, unit.times)

    def _failed(self, host: int, message: m.MemberFailed) -> None:
        self._launcher.run_failed(message.host, message.sequence, message.status)

    def _link_lost(self, host: int, message: m.LinkLost) -> None:
        island = self._resources.topology.island_of(host)
        self.broken[island] = f"host {host} of island {island} relays messages, or has one that does: {message.text}"


def relay_groups(hosts: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Return the groups of an island's hosts, each with at most `size` hosts. The first host of a group is its relay.

    There are no groups if the island has fewer than `size` hosts or `size` is 0.
    """
    if size < 2 or len(hosts) < size:
        return []
    groups = [tuple(hosts[first : first + size]) for first in range(0, len(hosts), size)]
    return [group for group in groups if len(group) > 1]
