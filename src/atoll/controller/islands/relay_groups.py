"""Groups of hosts with a relay, through which the controller sends messages to them and receives their reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from atoll.cluster.lifecycle import IslandDrained, IslandFailed
from atoll.cluster.processes.leases import PING_SECONDS
from atoll.controller.state import ClusterState
from atoll.launch.gang_ends import GangEnds
from atoll.protocol import messages as m
from atoll.protocol.forwarding import process_relay

# Seconds since the last message of a host from which it is pinged directly, since its relay may be at fault. A relay
# holds the answers of a group for at most a second.
_DIRECT_SECONDS = 2 * PING_SECONDS


class Relays:
    """Forms groups of `size` hosts, each with a relay, and handles the relays' reports. 0: no groups.

    A group belongs to one incarnation of its island. All hosts of an island end with it, so groups never change.

    A process of several islands has a relay beside its hosts, which forwards messages to all of them. It ends
    only with the process. The islands join and leave one by one, and form no other groups.

    Relays also forward pings, and report the answers of their hosts together, which `answered` handles.
    """

    def __init__(
        self, state: ClusterState, gang_ends: GangEnds, answered: Callable[[Sequence[m.RelayedPong]], None]
    ) -> None:
        self.broken: dict[int, str] = {}  # islands in which two hosts of a group cannot reach each other, with a text
        self._resources = state.resources
        self._outbox = state.outbox
        self._gang_ends = gang_ends
        self._size = state.settings.relay_group
        self._islands: set[int] = set()  # islands with groups
        self._connections = state.connections
        self._leases = state.leases
        self._answered = answered
        self.handlers: dict[type[Any], Any] = {
            m.Gathered: self._gathered,
            m.MemberFailed: self._failed,
            m.LinkLost: self._link_lost,
        }

    def join_process(self, host: int) -> None:
        """Add a host to the group of its process, if this process has a relay and the host is new there."""
        connections = self._connections
        peer = connections.peers[connections.hosts[host]]
        relay = None if peer.hello is None else connections.relays.get(peer.hello.process)
        if peer.hello is not None and relay is not None and self._outbox.relay_of(host) is None:
            self._outbox.join_process(host, peer.hello.incarnation, relay)

    def islands_behind(self, connection: int) -> list[int]:
        """Return the islands with connected hosts that receive messages through the relay with this connection."""
        island_of, connected = self._resources.topology.island_of, self._connections.hosts
        hosts = self._outbox.hosts_behind(process_relay(connection))
        return sorted({island_of(host) for host in hosts if host in connected})

    def handle(self, connection: int, message: m.MembersDone | m.MemberFailed) -> None:
        """Handle the report of a relay of a process, with this connection. Ignore hosts that it has no more."""
        relay, of = process_relay(connection), self._outbox.relay_of
        if isinstance(message, m.MemberFailed):
            if of(message.host) == relay:
                self._failed(message.host, message)
            return
        if message.pongs:
            self._pongs(relay, message.pongs)
        hosts, sequences, times = message.hosts, message.sequences, message.times
        first, count = 0, len(hosts)
        while first < count:  # hosts that have ended the same gang are next to one another
            stop, sequence = first + 1, sequences[first]
            if sequences.count(sequence) == count:  # of a joint gang
                stop = count
            while stop < count and sequences[stop] == sequence:
                stop += 1
            its, its_times = hosts[first:stop], times[2 * first : 2 * stop]
            if not self._outbox.are_behind(relay, its):
                there = [i for i, host in enumerate(its) if of(host) == relay]
                its_times = tuple([each for i in there for each in its_times[2 * i : 2 * i + 2]])
                its = tuple([its[i] for i in there])
            if its:
                self._gang_ends.parts_ended(its, sequence, its_times)
            first = stop

    def form(self) -> None:
        """Form the groups of islands whose hosts have all joined and know each other."""
        for island, record in self._resources.islands.items():
            if record.works and island not in self._islands and self._resources.has_all_hosts(island):
                self._islands.add(island)
                hosts = self._resources.hosts_of(island)
                if self._outbox.relay_of(hosts[0]) is None:
                    for group in relay_groups(hosts, self._size):
                        self._outbox.form_group(group)

    def forget_groups(self, lost: IslandFailed | IslandDrained) -> None:
        self._islands.discard(lost.island)
        self.broken.pop(lost.island, None)

    # ---- pings

    def responsive(self, hosts: Iterable[int], now: float) -> list[int]:
        """Return those of the hosts that are pinged through their relays."""
        if not self._outbox.has_relays:
            return []
        recent, of = self._leases.heard_since(now - _DIRECT_SECONDS), self._outbox.relay_of
        return [host for host in hosts if host in recent and of(host) is not None]

    def _pongs(self, relay: int, pongs: Sequence[m.RelayedPong]) -> None:
        """Handle answers that a relay reports. Ignore hosts that it has no more."""
        if not self._outbox.are_behind(relay, [pong.host for pong in pongs]):
            of = self._outbox.relay_of
            pongs = [pong for pong in pongs if of(pong.host) == relay]
        renew, now = self._leases.renew, self._outbox.seconds
        for pong in pongs:
            renew(pong.host, now)
        self._answered(pongs)

    # ---- messages

    def _gathered(self, host: int, message: m.Gathered) -> None:
        if message.pongs:
            self._pongs(host, message.pongs)
        for unit in message.units:
            self._gang_ends.parts_ended(unit.hosts, unit.sequence, unit.times)

    def _failed(self, host: int, message: m.MemberFailed) -> None:
        self._gang_ends.part_failed(message.host, message.sequence, message.status)

    def _link_lost(self, host: int, message: m.LinkLost) -> None:
        island = self._resources.topology.island_of(host)
        self.broken[island] = f"host {host} of island {island} lost a link of its relay group: {message.text}"


def relay_groups(hosts: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Return the groups of an island's hosts, each with at most `size` hosts. The first host of a group is its relay.

    There are no groups if the island has fewer than `size` hosts or `size` is 0.
    """
    if size < 2 or len(hosts) < size:
        return []
    groups = [tuple(hosts[first : first + size]) for first in range(0, len(hosts), size)]
    return [group for group in groups if len(group) > 1]
