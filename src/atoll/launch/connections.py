"""Who is at the other end of each connection."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from atoll.cluster.processes.leases import Leases
from atoll.errors import Status
from atoll.protocol import messages as m
from atoll.protocol.events import Received
from atoll.state.tenants import Tenant


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `handle(peer, event)` takes what it sends, by what it has turned out to be.

    `speaks` names its row of `protocol.permissions.ROLES`; "" before its Hello. `refuse(peer, status)` takes the reason
    why a message of it was refused, unhandled.
    """

    connection: int
    secret: str
    handle: Callable[[Peer, Received], None]
    refuse: Callable[[Peer, Status], None]
    speaks: str = ""
    hello: m.Hello | None = None
    number: int = 0  # of its host or session
    lose: Callable[[Peer, str], None] | None = None  # to be called when the connection is lost
    role: str = ""  # that its certificate has, if it has one
    address: str = ""
    tenant: Tenant | None = None  # of a client
    leases: Leases | None = None  # in which it has one, by its number


class Connections:
    """Those that are open, and which of them lead to hosts, sessions and the engine."""

    def __init__(self) -> None:
        self.peers: dict[int, Peer] = {}
        self.hosts: dict[int, int] = {}  # connections, by host
        self.sessions: dict[int, int] = {}
        self.engine: int | None = None
        self.away: set[int] = set()  # those that have no socket now

    @property
    def deciders(self) -> Collection[int]:
        """Those who decide which of two controllers goes on: the hosts, or where there are none, the engine."""
        engine = () if self.engine is None else (self.engine,)
        return tuple(self.hosts.values()) or engine

    def is_away(self, host: int) -> bool:
        """Whether the host cannot be heard now, and may be lost or come back."""
        return self.hosts.get(host) in self.away

    def is_admitted(self, connection: int) -> bool:
        """Return whether the connection is open, and its Hello was accepted."""
        peer = self.peers.get(connection)
        return peer is not None and peer.hello is not None

    def remove(self, connection: int) -> Any:
        """The connection is closed or lost; nothing is sent to it any more. Returns its peer, if it was known."""
        peer = self.peers.pop(connection, None)
        self.away.discard(connection)
        if peer is None:
            return None
        if self.hosts.get(peer.number) == connection:
            del self.hosts[peer.number]
        if self.sessions.get(peer.number) == connection:
            del self.sessions[peer.number]
        if self.engine == connection:
            self.engine = None
        return peer
