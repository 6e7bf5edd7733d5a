"""The resumable connections of a process that is dialed, by number.

It grants them, lets peers resume them on new sockets, and gives up those that are away for too long, or whose process
is known to have ended. All are for the loop's thread.

Invariant: a connection has one transport at most, the newest that its peer has dialed; none but who knows its secret
resumes it, and nobody that has seen a later term is served. What a peer has got under an earlier term is what this
process knows to have been sent then: who has more has it from a process that went on unseen, and is not served either.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from atoll.errors import FrameError
from atoll.wire.connection import Connection
from atoll.wire.resumption.link_messages import AlternateAddresses, Resume, Resumed, ResumeRefused, ResumeToken
from atoll.wire.resumption.resumable_connection import ResumableConnection
from atoll.wire.resumption.retransmit_buffer import Counts, RetransmitBuffer


@dataclass
class LinkState:
    """What outlives the process that was dialed, of one connection. Plain data, to be pickled at any time."""

    number: int
    role: str  # by the peer's certificate
    name: str
    retransmit_buffer: RetransmitBuffer = field(default_factory=RetransmitBuffer)
    # terms, and what had been sent when each began
    term_history: list[tuple[int, Counts]] = field(default_factory=list)


class AcceptedConnection(ResumableConnection):
    """The end of who was dialed. See `ResumableConnections`."""

    def __init__(
        self,
        table: ResumableConnections,
        state: LinkState,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(on_message, on_lost, state.name, state.retransmit_buffer)
        self.number = state.number
        self.peer_role = state.role
        self.pid = 0  # of the peer, where it is of this machine
        self.attempt = 0  # the peer's last
        self.term_history = state.term_history  # the terms that began since the peer was here
        self._table = table
        self._peer_has_ended = False
        self._fenced: Counts | None = None  # what had been sent when it was fenced
        self._close_when_unfenced = False  # when it is unfenced
        self._grace: asyncio.TimerHandle | None = None

    def state(self) -> LinkState:
        """What is to be kept of it now."""
        retransmit_buffer = self.retransmit_buffer
        kept = RetransmitBuffer(
            self.received,
            retransmit_buffer.acknowledged,
            retransmit_buffer.whole.copy(),
            retransmit_buffer.pieced.copy(),
            retransmit_buffer.nbytes,
        )
        return LinkState(self.number, self.peer_role, self.name, kept, self.term_history.copy())

    def _went_away(self, reason: str) -> None:
        if self._peer_has_ended:
            self._lose(reason)
            return
        self.wait(reason)
        self._table.on_away(self.number)

    def wait(self, reason: str) -> None:
        """It is away: its peer has so much time to come back."""
        seconds = self._table.seconds
        self._grace = asyncio.get_running_loop().call_later(
            seconds, self._lose, f"{reason}, and it was not back within {seconds:.0f} s"
        )

    def peer_ended(self) -> None:
        """The peer's process has ended; something that it has sent may still come."""
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
        # it may have been granted more before
        transport.send_link(self._table.resume_token(self.number, self._table.seconds))
        self._send_again()
        self.announce(self._table.alternate_addresses)
        if was_away:
            self._table.on_back(self.number)
        if self._close_when_unfenced:
            self.close()

    def fence(self) -> None:
        """Send and acknowledge nothing until `unfence` or a new transport."""
        if self._fenced is None:
            self._fenced, self._out = self.retransmit_buffer.sent, None
            if not self.is_away:
                self._table.on_away(self.number)

    def unfence(self) -> None:
        """Send what was queued since `fence`."""
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
        """Leave the connection to a later process, for which the peer waits `seconds`."""
        self._closed = True
        transport = self._release()
        if transport is not None:
            transport.send_link(self._table.resume_token(self.number, seconds))
            transport.close()
        self._over()

    def hand_over(self, addresses: tuple[str, ...]) -> None:
        """Another process goes on with it, there: its peer learns that, and nothing that it has not got yet."""
        self._closed = True
        transport = self._release()
        if transport is not None:
            transport.close_with(AlternateAddresses(addresses))
        self._over()

    def announce(self, addresses: tuple[str, ...]) -> None:
        """Send the peer the addresses at which it may also resume the connection."""
        if self._transport is not None:
            self._transport.send_link(AlternateAddresses(addresses))

    def _check_descent(self, message: Resume) -> None:
        """Raises FrameError where the peer has messages of an earlier term of which this process knows nothing."""
        for term, sent in self.term_history:
            if message.term < term and (message.whole > sent.whole or message.pieced > sent.pieced):
                raise FrameError(
                    f"the peer has messages of term {message.term} that were not known yet when term {term} began: "
                    "what they led to is lost, and may have run"
                )

    def lose(self, reason: str) -> None:
        """It cannot go on."""
        self._lose(reason)

    def _give_up(self) -> None:
        if self._transport is not None or self._grace is not None:  # else it is what an earlier process has sent
            super()._give_up()

    def _acknowledge_soon(self) -> None:
        self._table.acknowledge_soon(self)

    def _over(self) -> None:
        super()._over()
        if self._grace is not None:
            self._grace.cancel()
        self._table.forget(self)


class ResumableConnections:
    """The table. A connection may be away for `seconds`.

    `term` rises from one start of the process to the next, `key` is what its secrets are made of and the same for all
    starts. `on_away(number)` and `on_back(number)` are called for one that loses its transport, and gets another;
    `acknowledge_soon(connection)` when messages are to be acknowledged as soon as that is right; and `commit()` when
    they are to be safe at once. `watch(pid, then)` calls `then` once that process has ended.
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
    ) -> None:
        self.term = term
        self.seconds = seconds
        self.on_away = on_away
        self.on_back = on_back
        self.on_superseded: Callable[[int], None] = lambda term: None  # somebody who is to be believed is of that term
        self.acknowledge_soon = acknowledge_soon
        self._commit = commit
        # why nobody is to resume anything here for now; "": they may
        self.takeover_suspicion: Callable[[], str] = lambda: ""
        self._key = key
        self._watch = watch
        self._alternate_addresses: tuple[str, ...] = ()
        self._others: weakref.WeakSet[Connection] = weakref.WeakSet()  # that end with their sockets
        self._connections: dict[int, AcceptedConnection] = {}
        self._processes: dict[int, set[int]] = {}  # of this machine: numbers of connections, by pid

    def grant(
        self,
        number: int,
        transport: Connection,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ) -> AcceptedConnection:
        """The connection that has begun with this transport may be resumed."""
        connection = self.add(LinkState(number, transport.peer_role, transport.name), on_message, on_lost)
        connection.adopt(transport)
        transport.send_link(self.resume_token(number, self.seconds))
        if self._alternate_addresses:
            transport.send_link(AlternateAddresses(self._alternate_addresses))
        self._watch_process(connection, transport)
        return connection

    def resume_token(self, number: int, seconds: float) -> ResumeToken:
        return ResumeToken(number, self.secret(number), self.term, seconds)

    def introduce(self, connection: Connection) -> None:
        """One that ends with its socket: its peer dials anew, and learns where else."""
        self._others.add(connection)
        if self._alternate_addresses:
            connection.send_link(AlternateAddresses(self._alternate_addresses))

    def _watch_process(self, connection: AcceptedConnection, transport: Connection) -> None:
        """Nobody waits for a process of this machine that has ended."""
        pid = connection.pid = transport.peer_pid
        if not pid:
            return
        if pid not in self._processes:
            self._processes[pid] = set()
            self._watch(pid, partial(self._ended, pid))
        self._processes[pid].add(connection.number)

    def add(
        self, state: LinkState, on_message: Callable[[Any], None], on_lost: Callable[[str], None]
    ) -> AcceptedConnection:
        """Add a connection that has no transport yet."""
        connection = self._connections[state.number] = AcceptedConnection(self, state, on_message, on_lost)
        return connection

    def resume(self, transport: Connection, message: Resume) -> None:
        """Resume the connection that the first message of a new transport names."""
        is_known = self.is_secret_of(message)
        if is_known and message.term > self.term:
            self._refuse(transport, f"this is term {self.term}, and {message.term} has begun", final=False)
            self.on_superseded(message.term)
            return
        suspicion = self.takeover_suspicion()
        if suspicion:
            self._refuse(transport, suspicion, final=False)
            return
        self._commit()
        connection = self._connections.get(message.number)
        if connection is None or not is_known:
            self._refuse(transport, "it is not known here, or not any more", final=True)
        elif connection.peer_role != transport.peer_role:
            self._refuse(transport, f"it was that of a {connection.peer_role}", final=True)
        elif message.attempt <= connection.attempt:  # its peer has dialed again since
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
        """Addresses at which connections may be resumed where this process is gone."""
        return self._alternate_addresses

    @alternate_addresses.setter
    def alternate_addresses(self, addresses: tuple[str, ...]) -> None:
        self._alternate_addresses = addresses
        for connection in self._connections.values():
            connection.announce(addresses)
        for other in self._others:
            other.send_link(AlternateAddresses(addresses))

    def begin(self, term: int) -> None:
        """This term begins: what has been sent until now is all that this process knows of the earlier ones."""
        self.term = term
        for connection in self._connections.values():
            connection.term_history.append((term, connection.retransmit_buffer.sent))

    def is_secret_of(self, message: Resume) -> bool:
        """Whether it comes from who was granted that connection, here or where the term is another."""
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
        """All of them, in the order of their numbers. Each is to be acknowledged once a second, as a sign of life."""
        return list(self._connections.values())

    def count(self, number: int) -> None:
        """An earlier process has received one more message; does nothing for a connection that is not here."""
        connection = self._connections.get(number)
        if connection is not None:
            whole, pieced = connection.retransmit_buffer.received
            connection.retransmit_buffer.received = Counts(whole + 1, pieced)

    def acknowledged(self, number: int, counts: Counts) -> None:
        """The peer has said so to an earlier process; does nothing for a connection that is not here."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.retransmit_buffer.acknowledge(counts)
