"""The controller's connections and their peers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from atoll.cluster.processes.leases import Leases
from atoll.errors import Status
from atoll.protocol import messages as m
from atoll.protocol.events import Received
from atoll.state.tenants import Tenant


class PeerHandlers(msgspec.Struct, frozen=True, eq=False):
    """The controller's handlers for all peers that are in one state, such as workers that are ready.

    Attributes:
      speaks: The row of these peers in `protocol.permissions.ROLES`; "" before the Hello.
      handle: Handles a message of the peer.
      refuse: Called if a message of the peer was refused and not handled.
      disconnected: Called when the connection is lost, with the reason.
    """

    speaks: str
    handle: Callable[[Peer, Received], None]
    refuse: Callable[[Peer, Status], None]
    disconnected: Callable[[Peer, str], None] | None = None


class Peer(msgspec.Struct, eq=False):
    """The peer of one connection.

    Attributes:
      handlers: those of its state.
      number: the number of its host or session.
      role: the role in its certificate, if it has one.
      tenant: the tenant of a client.
      leases: the leases in which it has its own, under its number.
    """

    connection: int
    secret: str
    handlers: PeerHandlers
    hello: m.Hello | None = None
    number: int = 0
    role: str = ""
    address: str = ""
    tenant: Tenant | None = None
    leases: Leases | None = None

    @property
    def actor(self) -> str:
        """Its name in the record of what it has requested."""
        if self.hello is None or self.tenant is None:
            return self.hello.role if self.hello is not None else ""
        where = f" at {self.address}" if self.address else ""
        return f"tenant {self.tenant.name}, process {self.hello.pid}{where}"


class Connections:
    """The open connections, by number, and those of hosts, sessions, relays of processes, and the engine."""

    def __init__(self) -> None:
        self.peers: dict[int, Peer] = {}
        self.hosts: dict[int, int] = {}  # connections, by host
        self.sessions: dict[int, int] = {}  # connections, by session
        self.relays: dict[str, int] = {}  # connections of relays, by the names of their processes
        self.engine: int | None = None
        self.spare_engine: int | None = None  # takes the role of the engine if that is lost
        self.away: set[int] = set()  # connections without a socket now

    @property
    def deciders(self) -> Collection[int]:
        """The connections that decide which of two controllers continues: of the hosts, or else of the engine."""
        engine = () if self.engine is None else (self.engine,)
        return tuple(self.hosts.values()) or engine

    @property
    def trusted(self) -> Collection[int]:
        """The connections of the hosts and of the engine."""
        return {*self.hosts.values()} if self.engine is None else {*self.hosts.values(), self.engine}

    @property
    def has_engine(self) -> bool:
        """Return whether there is an engine whose connection has a socket."""
        return self.engine is not None and self.engine not in self.away

    def present_hosts(self) -> dict[int, int]:
        """Return the connections of hosts that have a socket now, by host."""
        return {host: connection for host, connection in self.hosts.items() if connection not in self.away}

    def is_away(self, host: int) -> bool:
        """Return whether the host's connection has no socket now: the host may be lost, or connect again."""
        return self.hosts.get(host) in self.away

    def is_admitted(self, connection: int) -> bool:
        """Return whether the connection is open, and its Hello was accepted."""
        peer = self.peers.get(connection)
        return peer is not None and peer.hello is not None

    def remove(self, connection: int) -> Any:
        """Forget a connection that is closed or lost. Return its peer, or None if it was unknown."""
        peer = self.peers.pop(connection, None)
        self.away.discard(connection)
        if peer is None:
            return None
        if self.hosts.get(peer.number) == connection:
            del self.hosts[peer.number]
        if self.sessions.get(peer.number) == connection:
            del self.sessions[peer.number]
        if peer.hello is not None and self.relays.get(peer.hello.process) == connection:
            del self.relays[peer.hello.process]
        if self.engine == connection:
            self.engine = None
        if self.spare_engine == connection:
            self.spare_engine = None
        return peer
