"""One end of a control connection that may have several sockets in a row, on an event loop.

Each socket's `wire.connection.Connection` is a *leg*. Between two legs the connection is away: what is sent then is
kept, and leaves with the next. Whoever sends and receives notices nothing.

Invariant: each message arrives once, in order, or the connection is lost, and both ends are told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from atoll.wire.connection import Connection, ConnectionStatistics
from atoll.wire.framing import encode
from atoll.wire.resumption.ledger import MAX_RETAINED, NONE, Counts, Ledger
from atoll.wire.resumption.messages import Acknowledge, AnyLinkMessage, Bye
from atoll.wire.resumption.pace import ACKNOWLEDGE_BYTES, ACKNOWLEDGE_MESSAGES


class ResumableConnection:
    """As `wire.connection.Connection`, whose methods and callbacks it has. `on_lost` comes when it is lost for good.

    A subclass says what happens when a leg is lost (`_went_away`), and adopts the next.
    """

    def __init__(
        self,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
        name: str,
        ledger: Ledger | None = None,
    ) -> None:
        self.on_lost = on_lost
        self.ledger = ledger or Ledger()
        self._name = name
        self._on_message = on_message
        self._leg: Connection | None = None
        self._out: Connection | None = None  # the leg, while something is to be said on it
        self._closed = False
        self._acknowledged = Counts()  # to the peer
        self._due = (0, 0)  # messages and bytes of this leg, after which they are acknowledged
        self._before = [0, 0, 0, 0]  # what earlier legs have counted

    # ---- sending

    def send(self, message: Any) -> None:
        """Queues one message. Never blocks; a message for a connection that has ended is dropped."""
        if not self._closed:
            self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        if self._closed:
            return
        ledger = self.ledger  # as its `keep`: this is on the path of every message
        ledger.whole.append(frame)
        ledger.nbytes += len(frame)
        if ledger.nbytes > MAX_RETAINED:
            self._give_up()
        if self._out is not None:
            self._out.send_encoded(frame)

    def send_in_pieces(self, frame: bytes) -> None:
        if self._closed:
            return
        if not self.ledger.keep_pieced(frame):
            self._give_up()
        if self._out is not None:
            self._out.send_in_pieces(frame)

    def _give_up(self) -> None:
        """Not at once: who sends does not expect a loss."""
        reason = f"{self._name} has not acknowledged {MAX_RETAINED >> 20} MiB that were sent to it"
        asyncio.get_running_loop().call_soon(self._lose, reason)

    # ---- legs

    @property
    def is_away(self) -> bool:
        return self._leg is None and not self._closed

    @property
    def received(self) -> Counts:
        """How many of the peer's messages have come, over all legs."""
        if self._leg is None:
            return self.ledger.received
        before, here = self.ledger.received, self._leg.received
        return Counts(before.whole + here.whole, before.pieced + here.pieced)

    def adopt(self, leg: Connection) -> None:
        """The connection goes on with this leg."""
        self._leg = self._out = leg
        self._due = ACKNOWLEDGE_MESSAGES, ACKNOWLEDGE_BYTES
        leg.name = self._name
        leg.on_message, leg.on_lost, leg.on_link, leg.on_read = self._on_message, self._leg_lost, self._link, self._read

    def _send_again(self, beyond: Counts = NONE) -> None:
        """What the peer has not acknowledged, on a leg that is new; what was kept beyond that, on one that is not."""
        assert self._leg is not None
        for frame, in_pieces in self.ledger.unacknowledged(beyond):
            if in_pieces:
                self._leg.send_in_pieces(frame)
            else:
                self._leg.send_encoded(frame)

    def drop(self, reason: str) -> None:
        """The leg is of no use any more, whatever the network thinks of it. Does nothing where there is none."""
        leg = self._release()
        if leg is not None:
            leg.abort()
            self._went_away(reason)

    def _release(self) -> Connection | None:
        """There is no leg any more; returns the one that was."""
        leg = self._leg
        if leg is not None:
            self.ledger.received = self.received
            counts = leg.statistics()
            here = counts.messages_in, counts.messages_out, counts.bytes_in, counts.bytes_out
            self._before = [a + b for a, b in zip(self._before, here, strict=True)]
            self._leg = self._out = None
        return leg

    def _leg_lost(self, reason: str) -> None:
        leg = self._release()
        if leg is None or leg.is_broken:
            self._lose(reason)
        else:
            self._went_away(reason)

    def _went_away(self, reason: str) -> None:
        """The leg is lost, and the connection is not."""
        raise NotImplementedError

    # ---- acknowledgements

    def _link(self, message: AnyLinkMessage) -> None:
        match message:
            case Acknowledge(whole=whole, pieced=pieced):
                self.ledger.acknowledge(Counts(whole, pieced))
            case Bye():
                self._lose(f"{self._name} closed the connection")

    def _read(self) -> None:
        leg = self._leg
        if leg is not None and (leg.messages_in >= self._due[0] or leg.bytes_in >= self._due[1]):
            self._due = leg.messages_in + ACKNOWLEDGE_MESSAGES, leg.bytes_in + ACKNOWLEDGE_BYTES
            self._acknowledge_soon()

    def _acknowledge_soon(self) -> None:
        self.acknowledge()

    def acknowledge(self) -> None:
        """All that has come will not be needed again, whatever happens to this process."""
        if self._out is not None:
            self._acknowledged = self.received
            self._out.send_link(Acknowledge(*self._acknowledged))

    # ---- ending

    def _lose(self, reason: str) -> None:
        """For good."""
        if self._closed:
            return
        self._closed = True
        leg = self._release()
        if leg is not None:
            leg.abort()
        self._over()
        self.on_lost(reason)

    def close(self) -> None:
        """Sends what is queued, where the peer takes it soon, and closes; `on_lost` is not called."""
        if self._closed:
            return
        self._closed = True
        leg = self._release()
        if leg is not None:
            leg.send_link(Bye())
            leg.close()
        self._over()

    def _over(self) -> None:
        """It is lost or closed: nothing is kept any more."""
        self.ledger = Ledger()

    # ---- what a connection tells

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        if self._leg is not None:
            self._leg.name = name

    @property
    def on_message(self) -> Callable[[Any], None]:
        return self._on_message

    @on_message.setter
    def on_message(self, on_message: Callable[[Any], None]) -> None:
        self._on_message = on_message
        if self._leg is not None:
            self._leg.on_message = on_message

    @property
    def is_closed(self) -> bool:
        return self._closed

    def statistics(self) -> ConnectionStatistics:
        """Over all legs; what is sent again counts again. While it is away, all that is kept is unsent."""
        here = self._leg.statistics() if self._leg is not None else ConnectionStatistics(0, 0, 0, 0, self.ledger.nbytes)
        a, b, c, d = self._before
        return ConnectionStatistics(
            a + here.messages_in, b + here.messages_out, c + here.bytes_in, d + here.bytes_out, here.unsent_bytes
        )
