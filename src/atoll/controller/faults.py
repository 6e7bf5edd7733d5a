"""Handle bugs of the controller, so that only the affected sessions end.

The shell skips the event that raised an exception (`controller_process.shell`). If the exception was raised before any
change of state (`NothingChangedError`), the process continues; otherwise it restarts from its journal. In both cases it
then handles `Skipped`. A bug in the turn of a session that has changed nothing (`Bug`) does not raise: the rest of the
turn continues. The event `Skipped` follows the turn, and skips nothing in this case.

If messages of one tenant repeatedly cause a bug, that tenant is suspended, and the bugs do not count as restarts of the
controller. Otherwise, one client could end the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from atoll.controller.islands.island_recovery import IslandRecovery
from atoll.controller.state import ClusterState
from atoll.errors import Code, Status
from atoll.launch.connections import Peer
from atoll.protocol import messages as m
from atoll.protocol.events import Skipped
from atoll.state.session import Session
from atoll.state.tenants import Tenant


class NothingChangedError(Exception):
    """A bug was found before the controller changed any state. Its `__cause__` is the bug's own exception."""


def failure(reason: str) -> Status:
    """Return the error for a session or a command whose message the controller failed at."""
    text = f"the controller failed at a message of this client ({reason}); its log has the traceback"
    return Status(Code.INTERNAL, text)


class Faults:
    """Ends what a skipped event belongs to.

    `end_session(number, status)` ends a session, and `abandon(number)` ends the lowering of its programs.
    `end_requests(connections)` drops the requests of commands.
    """

    def __init__(
        self,
        state: ClusterState,
        recovery: IslandRecovery,
        end_session: Callable[[int, Status], None],
        abandon: Callable[[int], None],
        end_requests: Callable[[Iterable[int]], None],
    ) -> None:
        self._connections = state.connections
        self._sessions: Mapping[int, Session] = state.sessions
        self._outbox = state.outbox
        self._history = state.history
        self._tenants = state.tenants
        self._offenses = state.offenses
        self._recovery = recovery
        self._end_session = end_session
        self._abandon = abandon
        self._end_requests = end_requests

    def charged(self, event: Skipped) -> Tenant | None:
        """Return the tenant that is charged for the bug, if only one tenant can have caused it."""
        if not self._tenants.are_told_apart:
            return None
        peers = (self._connections.peers.get(each) for each in (*event.connections, *event.suspects))
        found = {id(peer.tenant): peer.tenant for peer in peers if peer is not None and peer.tenant is not None}
        for number in event.sessions:
            session = self._sessions.get(number)
            if session is not None:
                found[id(session.tenant)] = session.tenant
        # Operators are not charged: they can end the cluster anyway, and must be able to maintain it.
        tenant = next(iter(found.values())) if len(found) == 1 else None
        return None if tenant is None or tenant.is_operator else tenant

    def skipped(self, event: Skipped) -> None:
        """Handle `Skipped`."""
        self._history.record("controller failed", event.reason)
        tenant = self.charged(event)
        self._end_requests(event.connections)
        for connection in event.connections:
            peer = self._connections.peers.get(connection)
            if peer is not None:
                self._end(peer, event.reason, is_charged=tenant is not None)
        for number in event.sessions:
            if number in self._sessions:
                self._end_session(number, failure(event.reason))
            self._abandon(number)
        problem = None if tenant is None else self._offenses.message_failed(tenant, self._outbox.seconds)
        if tenant is not None and problem is not None:
            self._history.record("suspended", problem.message, tenant=tenant.name)
            for session in [each for each in self._sessions.values() if each.tenant is tenant and not each.is_vault]:
                self._end_session(session.number, problem)

    def _end(self, peer: Peer, reason: str, is_charged: bool) -> None:
        connections = self._connections
        if connections.sessions.get(peer.number) == peer.connection:
            self._end_session(peer.number, failure(reason))
        elif connections.hosts.get(peer.number) == peer.connection:
            self._recovery.controller_failed(peer.number, reason, is_charged)
        elif connections.engine != peer.connection:  # a cluster ends without its engine
            self._outbox.send(peer.connection, m.Refused(failure(reason)))
            self._outbox.close(peer.connection)
            if peer.handlers.disconnected is not None:
                peer.handlers.disconnected(peer, reason)
