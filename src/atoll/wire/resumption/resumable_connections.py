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

import asyncio
import hashlib
import hmac
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.errors import FrameError
from atoll.wire.connection import Connection
from atoll.wire.resumption.link_messages import AlternateAddresses, Resume, Resumed, ResumeRefused, ResumeToken
from atoll.wire.resumption.link_record import LinkRecord
from atoll.wire.resumption.resumable_connection import ResumableConnection
from atoll.wire.resumption.retransmit_buffer import Counts, RetransmitBuffer


class AcceptedConnection(ResumableConnection):
    """The acceptor's end of a connection; see `ResumableConnections`."""

    def __init__(
        self,
        table: ResumableConnections,
        record: LinkRecord,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(on_message, on_lost, record.name, _buffer_of(record))
        self.number = record.number
        self.peer_role = record.role
        self.pid = 0  # process ID of a peer on this machine
        self.attempt = 0  # last attempt of the peer
        self.term_history = list(record.term_history)  # terms that began since the peer was last connected
        self._patience = record.patience
        self._table = table
        self._peer_has_ended = False
        self._fenced: Counts | None = None  # counts of sent messages at the time of `fence`
        self._close_when_unfenced = False
        self._grace: asyncio.TimerHandle | None = None

    def record(self) -> LinkRecord:
        """Return a copy of the current state."""
        buffer = self.retransmit_buffer
        return LinkRecord(
            self.number,
            self.peer_role,
            self.name,
            self.received,
            buffer.acknowledged,
            list(buffer.whole),
            list(buffer.pieced),
            self.term_history.copy(),
            self._patience,
        )

    def set_patience(self, seconds: float) -> None:
        """Let the peer wait for `seconds` after a loss of its socket, or as long as all others if it is 0."""
        self._patience = seconds
        if self._transport is not None:
            self._transport.send_link(self._resume_token())

    def _resume_token(self) -> ResumeToken:
        return self._table.resume_token(self.number, self._patience or self._table.seconds)

    def _went_away(self, reason: str) -> None:
        if self._peer_has_ended:
            self._lose(reason)
            return
        self.wait(reason)
        self._table.on_away(self.number)

    def wait(self, reason: str) -> None:
        """Wait for the peer of a connection that is away, and lose the connection if the grace expires."""
        seconds = self._table.seconds
        self._grace = asyncio.get_running_loop().call_later(
            seconds, self._lose, f"{reason}, and it did not reconnect within {seconds:.0f} s"
        )

    def peer_ended(self) -> None:
        """Note that the peer's process has ended. Messages that it sent before may still arrive."""
        self._peer_has_ended = True
        if self.is_away:
            self._lose("its process has ended")

    def resume(self, transport: Connection, message: Resume) -> None:
        """Continue on `transport`. Raise FrameError if the counts of the peer do not match those of this side."""
        self._check_descent(message)
        self.retransmit_buffer.acknowledge(Counts(message.whole, message.pieced))
        self.term_history = []
        was_away = self.is_away or self._fenced is not None
        self._fenced = None
        old = self._release()
        if old is not None:
            old.abort()
        if self._grace is not None:
            self._grace.cancel()
        self.attempt = message.attempt
        transport.authenticated()
        self.adopt(transport)
        self._acknowledged = self.received
        transport.send_link(Resumed(self._table.term, *self._acknowledged))
        # an earlier process may have granted a longer time
        transport.send_link(self._resume_token())
        self._send_again()
        self.announce(self._table.alternate_addresses)
        if was_away:
            self._table.on_back(self.number)
        if self._close_when_unfenced:
            self.close()

    def fence(self) -> None:
        """Send no messages and acknowledgements until `unfence` or a new transport."""
        if self._fenced is None:
            self._fenced, self._out = self.retransmit_buffer.sent, None
            if not self.is_away:
                self._table.on_away(self.number)

    def unfence(self) -> None:
        """Allow sending again, and send the messages that were queued since `fence`."""
        fenced, self._fenced = self._fenced, None
        if fenced is not None and self._transport is not None:
            self._out = self._transport
            self._send_again(fenced)
            if not self._close_when_unfenced:
                self._table.on_back(self.number)
        if self._close_when_unfenced:
            self.close()

    def close(self) -> None:
        if self._fenced is None:
            super().close()
        else:
            self._close_when_unfenced = True

    def detach(self, seconds: float) -> None:
        """Leave the connection to a later process. The peer waits for it for `seconds`."""
        self._closed = True
        transport = self._release()
        if transport is not None:
            transport.send_link(self._table.resume_token(self.number, seconds))
            transport.close()
        self._over()

    def hand_over(self, addresses: tuple[str, ...]) -> None:
        """Leave the connection to another process at `addresses`. Send them to the peer instead of queued messages."""
        self._closed = True
        transport = self._release()
        if transport is not None:
            transport.close_with(AlternateAddresses(addresses))
        self._over()

    def announce(self, addresses: tuple[str, ...]) -> None:
        """Send the peer the addresses at which it can also resume the connection."""
        if self._transport is not None:
            self._transport.send_link(AlternateAddresses(addresses))

    def _check_descent(self, message: Resume) -> None:
        """Raise FrameError if the peer has messages of an earlier term that this process does not know."""
        for term, sent in self.term_history:
            if message.term < term and (message.whole > sent.whole or message.pieced > sent.pieced):
                raise FrameError(
                    f"the peer has messages of term {message.term} that were not known when term {term} began: "
                    "their effects are lost, although the peer may have acted on them"
                )

    def lose(self, reason: str) -> None:
        """End the connection, and call `on_lost`."""
        self._lose(reason)

    def _give_up(self) -> None:
        if self._transport is not None or self._grace is not None:  # not while messages of an earlier process are added
            super()._give_up()

    def _acknowledge_soon(self) -> None:
        self._table.acknowledge_soon(self)

    def _over(self) -> None:
        super()._over()
        if self._grace is not None:
            self._grace.cancel()
        self._table.forget(self)


def _buffer_of(record: LinkRecord) -> RetransmitBuffer:
    whole, pieced = deque(record.whole), deque(record.pieced)
    nbytes = sum(map(len, whole)) + sum(map(len, pieced))
    return RetransmitBuffer(record.received, record.acknowledged, whole, pieced, nbytes)


class ResumableConnections:
    """The table of a process's accepted connections. A connection can be away for `seconds`.

    `term` increases with each start of the process. `key` is the source of the connections' secrets and does not
    change. The table calls `on_away(number)` when a connection loses its transport, and `on_back(number)` when it has
    another. It calls `acknowledge_soon(connection)` when received messages should be acknowledged once they are safe,
    and `commit()` to make all received messages safe at once. `watch(pid, then)` must call `then` when the process
    ends. `on_superseded(term)` is called if an authentic peer has a later term. `takeover_suspicion()` returns the
    reason why no connection can be resumed now, or "".
    """

    def __init__(
        self,
        term: int,
        seconds: float,
        key: bytes,
        on_away: Callable[[int], None],
        on_back: Callable[[int], None],
        acknowledge_soon: Callable[[AcceptedConnection], None],
        commit: Callable[[], None],
        watch: Callable[[int, Callable[[], None]], None],
        on_superseded: Callable[[int], None] = lambda term: None,
        takeover_suspicion: Callable[[], str] = lambda: "",
    ) -> None:
        self.term = term
        self.seconds = seconds
        self.on_away = on_away
        self.on_back = on_back
        self._on_superseded = on_superseded
        self.acknowledge_soon = acknowledge_soon
        self._commit = commit
        self._takeover_suspicion = takeover_suspicion
        self._key = key
        self._watch = watch
        self._alternate_addresses: tuple[str, ...] = ()
        self._others: weakref.WeakSet[Connection] = weakref.WeakSet()  # connections that cannot be resumed
        self._connections: dict[int, AcceptedConnection] = {}
        self._processes: dict[int, set[int]] = {}  # numbers of connections by process ID, for peers on this machine

    def grant(
        self,
        number: int,
        transport: Connection,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ) -> AcceptedConnection:
        """Create a resumable connection from its first transport."""
        connection = self.add(LinkRecord(number, transport.peer_role, transport.name), on_message, on_lost)
        connection.adopt(transport)
        transport.send_link(self.resume_token(number, self.seconds))
        if self._alternate_addresses:
            transport.send_link(AlternateAddresses(self._alternate_addresses))
        self._watch_process(connection, transport)
        return connection

    def resume_token(self, number: int, seconds: float) -> ResumeToken:
        return ResumeToken(number, self.secret(number), self.term, seconds)

    def introduce(self, connection: Connection) -> None:
        """Add a connection that cannot be resumed, so that its peer receives alternate addresses for its next dial."""
        self._others.add(connection)
        if self._alternate_addresses:
            connection.send_link(AlternateAddresses(self._alternate_addresses))

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
        self, record: LinkRecord, on_message: Callable[[Any], None], on_lost: Callable[[str], None]
    ) -> AcceptedConnection:
        """Add a connection that has no transport yet."""
        connection = self._connections[record.number] = AcceptedConnection(self, record, on_message, on_lost)
        return connection

    def resume(self, transport: Connection, message: Resume) -> None:
        """Resume the connection that the first message of a new transport names."""
        is_known = self.is_secret_of(message)
        if is_known and message.term > self.term:
            self._refuse(transport, f"this is term {self.term}, and term {message.term} has begun", final=False)
            self._on_superseded(message.term)
            return
        suspicion = self._takeover_suspicion()
        if suspicion:
            self._refuse(transport, suspicion, final=False)
            return
        self._commit()
        connection = self._connections.get(message.number)
        if connection is None or not is_known:
            self._refuse(transport, "it is unknown here or has ended", final=True)
        elif connection.peer_role != transport.peer_role:
            self._refuse(transport, f"it belongs to a {connection.peer_role}", final=True)
        elif message.attempt <= connection.attempt:  # the peer has dialed again since
            transport.abort()
        else:
            try:
                connection.resume(transport, message)
                self._watch_process(connection, transport)
            except FrameError as error:
                self._refuse(transport, str(error), final=True)
                connection.lose(str(error))

    def _refuse(self, transport: Connection, reason: str, *, final: bool) -> None:
        transport.refuse(f"its connection is not resumed: {reason}")
        transport.send_link(ResumeRefused(reason, final))
        transport.close()

    @property
    def alternate_addresses(self) -> tuple[str, ...]:
        """Addresses at which peers can resume connections if this process cannot be reached."""
        return self._alternate_addresses

    @alternate_addresses.setter
    def alternate_addresses(self, addresses: tuple[str, ...]) -> None:
        self._alternate_addresses = addresses
        for connection in self._connections.values():
            connection.announce(addresses)
        for other in self._others:
            other.send_link(AlternateAddresses(addresses))

    def begin(self, term: int) -> None:
        """Begin a term. The messages sent until now are all that this process knows of earlier terms."""
        self.term = term
        for connection in self._connections.values():
            connection.term_history.append((term, connection.retransmit_buffer.sent))

    def is_secret_of(self, message: Resume) -> bool:
        """Return whether the message has the secret of its connection, which is the same in all terms."""
        return hmac.compare_digest(message.secret, self.secret(message.number))

    def secret(self, number: int) -> str:
        return hmac.new(self._key, str(number).encode(), hashlib.sha256).hexdigest()

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

    def count(self, number: int) -> None:
        """Count one more message that an earlier process received, if the connection exists."""
        connection = self._connections.get(number)
        if connection is not None:
            whole, pieced = connection.retransmit_buffer.received
            connection.retransmit_buffer.received = Counts(whole + 1, pieced)

    def acknowledged(self, number: int, counts: Counts) -> None:
        """Apply an acknowledgement that an earlier process received, if the connection exists."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.retransmit_buffer.acknowledge(counts)
