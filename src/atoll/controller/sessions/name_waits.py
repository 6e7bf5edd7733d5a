"""Scripts that wait for the names of their runs, because other sessions of their tenants have these names."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.controller.sessions.detached_sessions import DetachedSessions, held_text
from atoll.controller.state import ClusterState
from atoll.errors import Code, Status, StatusError
from atoll.launch.connections import Peer
from atoll.protocol import messages as m
from atoll.state.tenants import Tenant

MAX_WAITING = 16  # scripts of a tenant
# After this time, a script that waits gets the reason.
TELL_SECONDS = 3.0


class NameWaits:
    """The proxies that wait until no other session has the name of their run, in the order of their requests.

    They do not count as sessions.
    """

    def __init__(self, state: ClusterState, detached: DetachedSessions) -> None:
        self._limit = state.settings.max_sessions
        self._peers = state.connections.peers
        self._outbox = state.outbox
        self._detached = detached
        self._until: dict[int, float] = {}  # by connection
        self._told: set[int] = set()  # the connections on which the reason of the wait was sent

    def __len__(self) -> int:
        """Return the number of proxies that wait."""
        return len(self._until)

    def add(self, peer: Peer) -> None:
        """Let a proxy wait for the time that its Hello gives. Raises StatusError if too many wait."""
        tenant, _, seconds = _request_of(peer)
        if len(self) >= self._limit:
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"{self._limit} scripts wait for the names of their runs")
        waiting = sum(self._peers[connection].tenant is tenant for connection in self._until)
        if waiting >= MAX_WAITING:
            text = f"{waiting} scripts of tenant {tenant.name} wait for the names of their runs"
            raise StatusError(Code.RESOURCE_EXHAUSTED, text)
        self._until[peer.connection] = self._outbox.seconds + seconds

    def remove(self, peer: Peer) -> bool:
        """End the wait of a proxy. Return whether it waited."""
        self._told.discard(peer.connection)
        return self._until.pop(peer.connection, None) is not None

    def with_free_names(self) -> Iterator[Peer]:
        """Yield the proxies whose names no session has. Each is to be removed before the next one is taken."""
        held = self._detached.held()
        for connection in list(self._until):
            peer = self._peers[connection]
            tenant, name, _ = _request_of(peer)
            if (tenant, name) in held:
                continue
            yield peer
            if self._detached.holder(tenant, name) is not None:
                held.add((tenant, name))

    def tell(self, now: float) -> None:
        """Send the reason of their wait to the proxies that have waited for a while, once to each."""
        for connection, until in self._until.items():
            peer = self._peers[connection]
            tenant, name, seconds = _request_of(peer)
            if connection in self._told or now < until - seconds + TELL_SECONDS:
                continue
            holder = self._detached.holder(tenant, name)
            if holder is not None:
                self._told.add(connection)
                text = f"this script waits for up to {until - now:.0f} s more: {held_text(holder, name)}"
                self._outbox.send(connection, m.Late(text))

    def late(self, now: float) -> Iterator[tuple[Peer, Status]]:
        """Yield the proxies that have waited for too long, with the reason. Each is to be removed."""
        for connection, until in list(self._until.items()):
            if now < until:
                continue
            peer = self._peers[connection]
            tenant, name, _ = _request_of(peer)
            holder = self._detached.holder(tenant, name)
            if holder is not None:
                yield peer, Status(Code.ALREADY_EXISTS, held_text(holder, name))


def _request_of(peer: Peer) -> tuple[Tenant, str, float]:
    """Return the tenant and the name of a proxy's run, and the seconds for which it waits for the name."""
    assert peer.hello is not None
    assert peer.tenant is not None
    return peer.tenant, peer.hello.run.name, peer.hello.run.wait
