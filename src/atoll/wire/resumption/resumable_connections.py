"""The acceptor's ends of resumable connections, by number, on an event loop.

The table grants resumption, resumes connections on new sockets, and gives up connections that are away for too long or
whose peer has ended.

Invariants:
- A connection has at most one transport, the newest one that its peer has dialed.
- Only a peer that knows the secret of a connection can resume it.
- The acceptor refuses peers that have seen a later term.
- The acceptor refuses peers that received messages under an earlier term of which it does not know. An earlier process
  sent them after its successor had taken over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.errors import FrameError
from atoll.wire.connection import Connection
from atoll.wire.late_timers import ReadingTimer
from atoll.wire.resumption.accepted_link import AcceptedLink, Acceptor
from atoll.wire.resumption.link import LIMITS, LinkEvent, LinkLimits
from atoll.wire.resumption.link_messages import AlternateAddresses, Resume, ResumeRefused
from atoll.wire.resumption.link_record import LinkRecord
from atoll.wire.resumption.resumable_connection import ResumableConnection


class AcceptedConnection(ResumableConnection[AcceptedLink]):
    """The acceptor's end of a connection; see `ResumableConnections`."""

    def __init__(
        self,
        table: ResumableConnections,
        link: AcceptedLink,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(link, on_message, on_lost)
        self._table = table
        self.number = link.number
        self.peer_role = link.role
        self.pid = 0  # process ID of a peer on this machine
        self._grace: ReadingTimer | None = None

    def record(self) -> LinkRecord:
        """Return a copy of the state that survives this process."""
        return self.link.record()

    def grant(self, transport: Connection) -> None:
        """Begin on the first transport, and allow the peer to resume the connection."""
        self.link.grant(transport.decoder)
        self._adopt(transport, self._on_message)
        self._do_effects()

    def resume(self, transport: Connection, message: Resume) -> None:
        """Continue on `transport`. Raise FrameError if the counts of the peer do not match those of this side."""
        self.link.resume(message, transport.decoder)
        transport.authenticated()
        self._adopt(transport, self._on_message)
        self._await_peer()
        self._do_effects()

    def _do(self, event: LinkEvent) -> None:
        super()._do(event)
        match event:
            case LinkEvent.AWAY:
                self._await_peer()
                self._table.on_away(self.number)
            case LinkEvent.FENCED:
                self._table.on_away(self.number)
            case LinkEvent.BACK:
                self._table.on_back(self.number)

    def wait(self, reason: str) -> None:
        """Wait for the peer of a connection that is away, and lose the connection if the grace expires."""
        self.link.wait(self._loop.time(), reason)
        self._await_peer()
        self._do_effects()

    def _await_peer(self) -> None:
        """Set the timer to the deadline of the link."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        deadline = self.link.deadline
        if deadline is not None:
            self._grace = ReadingTimer(self._loop, deadline, partial(self._expire, deadline))

    def _expire(self, deadline: float) -> None:
        self.link.expire(deadline)
        self._do_effects()

    def set_patience(self, seconds: float) -> None:
        """Let the peer wait for `seconds` after a loss of its socket, or as long as all others if it is 0."""
        self.link.set_patience(seconds)
        self._do_effects()

    def peer_ended(self) -> None:
        """Note that the peer's process has ended. Messages that it sent before may still arrive."""
        self.link.peer_ended()
        self._do_effects()

    def fence(self) -> None:
        """Send no messages and acknowledgements until `unfence` or a new transport."""
        self.link.fence()
        self._do_effects()

    def unfence(self) -> None:
        """Allow sending again, and send the messages that were queued since `fence`."""
        self.link.unfence()
        self._do_effects()

    def detach(self, seconds: float) -> None:
        """Leave the connection to a later process. The peer waits for it for `seconds`."""
        self.link.detach(seconds)
        self._do_effects()

    def hand_over(self, addresses: tuple[str, ...]) -> None:
        """Leave the connection to another process at `addresses`. Send them to the peer instead of queued messages."""
        if self._transport is not None:
            self._transport.drop_queued()
        self.link.hand_over(addresses)
        self._do_effects()

    def announce(self) -> None:
        """Send the peer the addresses at which it can also resume the connection."""
        self.link.announce()
        self._do_effects()

    def lose(self, reason: str) -> None:
        """End the connection, and call `on_lost`."""
        self.link.lose(reason)
        self._do_effects()

    def _acknowledge_soon(self) -> None:
        self._table.acknowledge_soon(self)

    def _over(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        self._table.forget(self)


class ResumableConnections:
    """The table of a process's accepted connections, whose links have this `acceptor`.

    The table calls `on_away(number)` when a connection loses its transport, and `on_back(number)` when it has another.
    It calls `acknowledge_soon(connection)` when received messages should be acknowledged once they are safe, and
    `commit()` to make all received messages safe at once. `watch(pid, then)` must call `then` when the process ends. If
    a peer that knows its secret has seen a later term, `on_superseded(message)` is called, and the caller decides
    whether to believe the peer. `takeover_suspicion()` returns the reason why no connection can be resumed now, or "".
    """

    def __init__(
        self,
        acceptor: Acceptor,
        *,
        on_away: Callable[[int], None],
        on_back: Callable[[int], None],
        acknowledge_soon: Callable[[AcceptedConnection], None],
        commit: Callable[[], None],
        watch: Callable[[int, Callable[[], None]], None],
        on_superseded: Callable[[Resume], None] = lambda message: None,
        takeover_suspicion: Callable[[], str] = lambda: "",
        limits: LinkLimits = LIMITS,
    ) -> None:
        self._acceptor = acceptor
        self.on_away = on_away
        self.on_back = on_back
        self._on_superseded = on_superseded
        self.acknowledge_soon = acknowledge_soon
        self._commit = commit
        self._takeover_suspicion = takeover_suspicion
        self._watch = watch
        self._limits = limits
        self._others: weakref.WeakSet[Connection] = weakref.WeakSet()  # connections that cannot be resumed
        self._connections: dict[int, AcceptedConnection] = {}
        self._processes: dict[int, set[int]] = {}  # numbers of connections by process ID, for peers on this machine

    @property
    def term(self) -> int:
        return self._acceptor.term

    @property
    def key(self) -> bytes:
        """The key from which the secrets of the connections are derived."""
        return self._acceptor.key

    def grant(
        self,
        number: int,
        transport: Connection,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ) -> AcceptedConnection:
        """Create a resumable connection from its first transport."""
        record = LinkRecord(number, transport.peer_role, transport.name)
        connection = self.add(AcceptedLink(self._acceptor, record, self._limits), on_message, on_lost)
        connection.grant(transport)
        self._watch_process(connection, transport)
        return connection

    def introduce(self, connection: Connection) -> None:
        """Add a connection that cannot be resumed, so that its peer receives alternate addresses for its next dial."""
        self._others.add(connection)
        if self.alternate_addresses:
            connection.send_link(AlternateAddresses(self.alternate_addresses))

    def _watch_process(self, connection: AcceptedConnection, transport: Connection) -> None:
        """Give up the connection when the peer's process ends, if it is on this machine."""
        pid = connection.pid = transport.peer_pid
        if not pid:
            return
        if pid not in self._processes:
            self._processes[pid] = set()
            self._watch(pid, partial(self._ended, pid))
        self._processes[pid].add(connection.number)

    def add(
        self, link: AcceptedLink, on_message: Callable[[Any], None], on_lost: Callable[[str], None]
    ) -> AcceptedConnection:
        """Add a connection that has no transport yet."""
        connection = self._connections[link.number] = AcceptedConnection(self, link, on_message, on_lost)
        return connection

    def resume(self, transport: Connection, message: Resume) -> None:
        """Resume the connection that the first message of a new transport names."""
        later = self._acceptor.later_term(message)
        if later is not None:
            self._refuse(transport, later)
            self._on_superseded(message)
            return
        answer = self._acceptor.answer_to_controller(message)
        if answer is not None:
            self._refuse(transport, answer)
            return
        suspicion = self._takeover_suspicion()
        if suspicion:
            self._refuse(transport, ResumeRefused(suspicion, final=False))
            return
        self._commit()
        connection = self._connections.get(message.number)
        link = None if connection is None else connection.link
        refusal = self._acceptor.refusal(message, link, transport.peer_role)
        if refusal is not None:
            # A peer with the secret of a connection that has ended confirms its close, which needs no line in the log.
            self._refuse(transport, refusal, is_logged=link is not None or not self._acceptor.is_secret_of(message))
            return
        assert connection is not None
        if message.attempt <= connection.link.attempt:  # the peer has dialed again since
            transport.abort()
        else:
            try:
                connection.resume(transport, message)
                self._watch_process(connection, transport)
            except FrameError as error:
                self._refuse(transport, ResumeRefused(str(error), final=True))
                connection.lose(str(error))

    def _refuse(self, transport: Connection, refusal: ResumeRefused, *, is_logged: bool = True) -> None:
        if is_logged:
            transport.refuse(f"its connection is not resumed: {refusal.reason}")
        transport.send_link(refusal)
        transport.close()

    @property
    def alternate_addresses(self) -> tuple[str, ...]:
        """Addresses at which peers can resume connections if this process cannot be reached."""
        return self._acceptor.addresses

    @alternate_addresses.setter
    def alternate_addresses(self, addresses: tuple[str, ...]) -> None:
        self._acceptor.addresses = addresses
        for connection in self._connections.values():
            connection.announce()
        for other in self._others:
            other.send_link(AlternateAddresses(addresses))

    def begin(self, term: int) -> None:
        """Begin a term. The messages sent until now are all that this process knows of earlier terms."""
        self._acceptor.term = term
        for connection in self._connections.values():
            connection.link.begin(term)

    def secret(self, number: int) -> str:
        return self._acceptor.secret(number)

    def _ended(self, pid: int) -> None:
        for number in self._processes.pop(pid, ()):
            connection = self._connections.get(number)
            if connection is not None:
                connection.peer_ended()

    def forget(self, connection: AcceptedConnection) -> None:
        self._connections.pop(connection.number, None)
        self._processes.get(connection.pid, set()).discard(connection.number)

    def all(self) -> list[AcceptedConnection]:
        """Return all connections. The caller must acknowledge each once per second as a heartbeat."""
        return list(self._connections.values())
