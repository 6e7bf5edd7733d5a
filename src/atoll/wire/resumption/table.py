"""The resumable connections of a process that is dialed, by number.

It grants them, lets peers resume them on new sockets, and gives up those that are away for too long, or whose process
is known to have ended. All are for the loop's thread.

Invariant: a connection has one leg at most, the newest that its peer has dialed; none but who knows its secret resumes
it, and nobody that has seen a later term is served. What a peer has got under an earlier term is what this process
knows to have been sent then: who has more has it from a process that went on unseen, and is not served either.
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
from atoll.wire.resumption.connection import ResumableConnection
from atoll.wire.resumption.ledger import Counts, Ledger
from atoll.wire.resumption.messages import Elsewhere, Granted, NotResumed, Resume, Resumed


@dataclass
class LinkState:
    """What outlives the process that was dialed, of one connection. Plain data, to be pickled at any time."""

    number: int
    role: str  # by the peer's certificate
    name: str
    ledger: Ledger = field(default_factory=Ledger)
    begun: list[tuple[int, Counts]] = field(default_factory=list)  # terms, and what had been sent when each began


class AcceptedConnection(ResumableConnection):
    """The end of who was dialed. See `ResumableConnections`."""

    def __init__(
        self,
        table: ResumableConnections,
        state: LinkState,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(on_message, on_lost, state.name, state.ledger)
        self.number = state.number
        self.peer_role = state.role
        self.pid = 0  # of the peer, where it is of this machine
        self.attempt = 0  # the peer's last
        self.begun = state.begun  # since the peer was here
        self._table = table
        self._peer_has_ended = False
        self._corked: Counts | None = None  # what had been sent when it was
        self._closes = False  # when it is uncorked
        self._grace: asyncio.TimerHandle | None = None

    def state(self) -> LinkState:
        """What is to be kept of it now."""
        ledger = self.ledger
        kept = Ledger(self.received, ledger.acknowledged, ledger.whole.copy(), ledger.pieced.copy(), ledger.nbytes)
        return LinkState(self.number, self.peer_role, self.name, kept, self.begun.copy())

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

    def resume(self, leg: Connection, message: Resume) -> None:
        """Goes on with this leg. Raises FrameError where the peer counts other messages than this side."""
        self._check_descent(message)
        self.ledger.acknowledge(Counts(message.whole, message.pieced))
        self.begun = []
        was_away = self.is_away or self._corked is not None
        self._corked = None
        old = self._release()
        if old is not None:
            old.abort()
        if self._grace is not None:
            self._grace.cancel()
        self.attempt = message.attempt
        leg.authenticated()
        self.adopt(leg)
        self._acknowledged = self.received
        leg.send_link(Resumed(self._table.term, *self._acknowledged))
        leg.send_link(self._table.granted(self.number, self._table.seconds))  # it may have been granted more before
        self._send_again()
        self.announce(self._table.elsewhere)
        if was_away:
            self._table.on_back(self.number)
        if self._closes:
            self.close()

    def cork(self) -> None:
        """From now on nothing is said, and nothing that comes is acknowledged, until `uncork`, or another leg."""
        if self._corked is None:
            self._corked, self._out = self.ledger.sent, None
            if not self.is_away:
                self._table.on_away(self.number)

    def uncork(self) -> None:
        """What was to be said meanwhile follows at once."""
        corked, self._corked = self._corked, None
        if corked is not None and self._leg is not None:
            self._out = self._leg
            self._send_again(corked)
            if not self._closes:
                self._table.on_back(self.number)
        if self._closes:
            self.close()

    def close(self) -> None:
        if self._corked is None:
            super().close()
        else:
            self._closes = True

    def leave(self, seconds: float) -> None:
        """This process ends, and the connection does not: its peer waits for so long for one that goes on with it."""
        self._closed = True
        leg = self._release()
        if leg is not None:
            leg.send_link(self._table.granted(self.number, seconds))
            leg.close()
        self._over()

    def hand_over(self, addresses: tuple[str, ...]) -> None:
        """Another process goes on with it, there: its peer learns that, and nothing that it has not got yet."""
        self._closed = True
        leg = self._release()
        if leg is not None:
            leg.close_with(Elsewhere(addresses))
        self._over()

    def announce(self, addresses: tuple[str, ...]) -> None:
        """Where it may be resumed, too."""
        if self._leg is not None:
            self._leg.send_link(Elsewhere(addresses))

    def _check_descent(self, message: Resume) -> None:
        """Raises FrameError where the peer has messages of an earlier term of which this process knows nothing."""
        for term, sent in self.begun:
            if message.term < term and (message.whole > sent.whole or message.pieced > sent.pieced):
                raise FrameError(
                    f"the peer has messages of term {message.term} that were not known yet when term {term} began: "
                    "what they led to is lost, and may have run"
                )

    def lose(self, reason: str) -> None:
        """It cannot go on."""
        self._lose(reason)

    def _give_up(self) -> None:
        if self._leg is not None or self._grace is not None:  # else it is what an earlier process has sent
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
    starts. `on_away(number)` and `on_back(number)` are called for one that loses its leg, and gets another;
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
        self.doubt: Callable[[], str] = lambda: ""  # why nobody is to resume anything here for now; "": they may
        self._key = key
        self._watch = watch
        self._elsewhere: tuple[str, ...] = ()
        self._others: weakref.WeakSet[Connection] = weakref.WeakSet()  # that end with their sockets
        self._connections: dict[int, AcceptedConnection] = {}
        self._processes: dict[int, set[int]] = {}  # of this machine: numbers of connections, by pid

    def grant(
        self,
        number: int,
        leg: Connection,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ) -> AcceptedConnection:
        """The connection that has begun with this leg may be resumed."""
        connection = self.add(LinkState(number, leg.peer_role, leg.name), on_message, on_lost)
        connection.adopt(leg)
        leg.send_link(self.granted(number, self.seconds))
        if self._elsewhere:
            leg.send_link(Elsewhere(self._elsewhere))
        self._watch_process(connection, leg)
        return connection

    def granted(self, number: int, seconds: float) -> Granted:
        return Granted(number, self.secret(number), self.term, seconds)

    def introduce(self, connection: Connection) -> None:
        """One that ends with its socket: its peer dials anew, and learns where else."""
        self._others.add(connection)
        if self._elsewhere:
            connection.send_link(Elsewhere(self._elsewhere))

    def _watch_process(self, connection: AcceptedConnection, leg: Connection) -> None:
        """Nobody waits for a process of this machine that has ended."""
        pid = connection.pid = leg.peer_pid
        if not pid:
            return
        if pid not in self._processes:
            self._processes[pid] = set()
            self._watch(pid, partial(self._ended, pid))
        self._processes[pid].add(connection.number)

    def add(
        self, state: LinkState, on_message: Callable[[Any], None], on_lost: Callable[[str], None]
    ) -> AcceptedConnection:
        """One without a leg."""
        connection = self._connections[state.number] = AcceptedConnection(self, state, on_message, on_lost)
        return connection

    def resume(self, leg: Connection, message: Resume) -> None:
        """A new leg says which connection it carries."""
        is_known = self.is_secret_of(message)
        if is_known and message.term > self.term:
            self._refuse(leg, f"this is term {self.term}, and {message.term} has begun", final=False)
            self.on_superseded(message.term)
            return
        doubt = self.doubt()
        if doubt:
            self._refuse(leg, doubt, final=False)
            return
        self._commit()
        connection = self._connections.get(message.number)
        if connection is None or not is_known:
            self._refuse(leg, "it is not known here, or not any more", final=True)
        elif connection.peer_role != leg.peer_role:
            self._refuse(leg, f"it was that of a {connection.peer_role}", final=True)
        elif message.attempt <= connection.attempt:  # its peer has dialed again since
            leg.abort()
        else:
            try:
                connection.resume(leg, message)
                self._watch_process(connection, leg)
            except FrameError as error:
                self._refuse(leg, str(error), final=True)
                connection.lose(str(error))

    def _refuse(self, leg: Connection, reason: str, *, final: bool) -> None:
        leg.refuse(f"its connection is not resumed: {reason}")
        leg.send_link(NotResumed(reason, final))
        leg.close()

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Addresses at which connections may be resumed where this process is gone."""
        return self._elsewhere

    @elsewhere.setter
    def elsewhere(self, addresses: tuple[str, ...]) -> None:
        self._elsewhere = addresses
        for connection in self._connections.values():
            connection.announce(addresses)
        for other in self._others:
            other.send_link(Elsewhere(addresses))

    def begin(self, term: int) -> None:
        """This term begins: what has been sent until now is all that this process knows of the earlier ones."""
        self.term = term
        for connection in self._connections.values():
            connection.begun.append((term, connection.ledger.sent))

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
            whole, pieced = connection.ledger.received
            connection.ledger.received = Counts(whole + 1, pieced)

    def acknowledged(self, number: int, counts: Counts) -> None:
        """The peer has said so to an earlier process; does nothing for a connection that is not here."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.ledger.acknowledge(counts)
