"""One end of a control connection that may have several sockets in a row, on an event loop.

Each socket's `wire.connection.Connection` is a *transport*. Between two transports the connection is away: what is sent
then is kept, and leaves with the next. Whoever sends and receives notices nothing.

Invariant: each message arrives once, in order, or the connection is lost, and both ends are told so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from atoll.wire.connection import Connection, ConnectionStatistics
from atoll.wire.framing import encode
from atoll.wire.resumption.acknowledgment_pace import ACKNOWLEDGE_BYTES, ACKNOWLEDGE_MESSAGES
from atoll.wire.resumption.link_messages import Acknowledge, AnyLinkMessage, Close
from atoll.wire.resumption.retransmit_buffer import MAX_RETAINED, NONE, Counts, RetransmitBuffer


class ResumableConnection:
    """As `wire.connection.Connection`, whose methods and callbacks it has. `on_lost` comes when it is lost for good.

    A subclass says what happens when a transport is lost (`_went_away`), and adopts the next.
    """

    def __init__(
        self,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
        name: str,
        retransmit_buffer: RetransmitBuffer | None = None,
    ) -> None:
        self.on_lost = on_lost
        self.retransmit_buffer = retransmit_buffer or RetransmitBuffer()
        self._name = name
        self._on_message = on_message
        self._transport: Connection | None = None
        self._out: Connection | None = None  # the transport, while something is to be said on it
        self._closed = False
        self._acknowledged = Counts()  # to the peer
        self._due = (0, 0)  # messages and bytes of this transport, after which they are acknowledged
        self._before = [0, 0, 0, 0]  # what earlier transports have counted

    # ---- sending

    def send(self, message: Any) -> None:
        """Queues one message. Never blocks; a message for a connection that has ended is dropped."""
        if not self._closed:
            self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        if self._closed:
            return
        retransmit_buffer = self.retransmit_buffer  # as its `retain`: this is on the path of every message
        retransmit_buffer.whole.append(frame)
        retransmit_buffer.nbytes += len(frame)
        if retransmit_buffer.nbytes > MAX_RETAINED:
            self._give_up()
        if self._out is not None:
            self._out.send_encoded(frame)

    def send_in_pieces(self, frame: bytes) -> None:
        if self._closed:
            return
        if not self.retransmit_buffer.retain_pieced(frame):
            self._give_up()
        if self._out is not None:
            self._out.send_in_pieces(frame)

    def _give_up(self) -> None:
        """Not at once: who sends does not expect a loss."""
        reason = f"{self._name} has not acknowledged {MAX_RETAINED >> 20} MiB that were sent to it"
        asyncio.get_running_loop().call_soon(self._lose, reason)

    # ---- transports

    @property
    def is_away(self) -> bool:
        return self._transport is None and not self._closed

    @property
    def received(self) -> Counts:
        """Return the counts of the peer's messages over all transports."""
        if self._transport is None:
            return self.retransmit_buffer.received
        before, here = self.retransmit_buffer.received, self._transport.received
        return Counts(before.whole + here.whole, before.pieced + here.pieced)

    def adopt(self, transport: Connection) -> None:
        """Continue the connection on `transport`."""
        self._transport = self._out = transport
        self._due = ACKNOWLEDGE_MESSAGES, ACKNOWLEDGE_BYTES
        transport.name = self._name
        transport.on_message, transport.on_lost, transport.on_link, transport.on_read = (
            self._on_message,
            self._transport_lost,
            self._link,
            self._read,
        )

    def _send_again(self, beyond: Counts = NONE) -> None:
        """Send the frames after `beyond` that the peer has not acknowledged."""
        assert self._transport is not None
        for frame, in_pieces in self.retransmit_buffer.unacknowledged(beyond):
            if in_pieces:
                self._transport.send_in_pieces(frame)
            else:
                self._transport.send_encoded(frame)

    def drop(self, reason: str) -> None:
        """Abort the current transport, if there is one."""
        transport = self._release()
        if transport is not None:
            transport.abort()
            self._went_away(reason)

    def _release(self) -> Connection | None:
        """Remove the current transport and return it."""
        transport = self._transport
        if transport is not None:
            self.retransmit_buffer.received = self.received
            counts = transport.statistics()
            here = counts.messages_in, counts.messages_out, counts.bytes_in, counts.bytes_out
            self._before = [a + b for a, b in zip(self._before, here, strict=True)]
            self._transport = self._out = None
        return transport

    def _transport_lost(self, reason: str) -> None:
        transport = self._release()
        if transport is None or transport.is_broken:
            self._lose(reason)
        else:
            self._went_away(reason)

    def _went_away(self, reason: str) -> None:
        """The transport is lost, and the connection is not."""
        raise NotImplementedError

    # ---- acknowledgements

    def _link(self, message: AnyLinkMessage) -> None:
        match message:
            case Acknowledge(whole=whole, pieced=pieced):
                self.retransmit_buffer.acknowledge(Counts(whole, pieced))
            case Close():
                self._lose(f"{self._name} closed the connection")

    def _read(self) -> None:
        transport = self._transport
        if transport is not None and (transport.messages_in >= self._due[0] or transport.bytes_in >= self._due[1]):
            self._due = transport.messages_in + ACKNOWLEDGE_MESSAGES, transport.bytes_in + ACKNOWLEDGE_BYTES
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
        transport = self._release()
        if transport is not None:
            transport.abort()
        self._over()
        self.on_lost(reason)

    def close(self) -> None:
        """Sends what is queued, where the peer takes it soon, and closes; `on_lost` is not called."""
        if self._closed:
            return
        self._closed = True
        transport = self._release()
        if transport is not None:
            transport.send_link(Close())
            transport.close()
        self._over()

    def _over(self) -> None:
        """It is lost or closed: nothing is kept any more."""
        self.retransmit_buffer = RetransmitBuffer()

    # ---- what a connection tells

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        if self._transport is not None:
            self._transport.name = name

    @property
    def on_message(self) -> Callable[[Any], None]:
        return self._on_message

    @on_message.setter
    def on_message(self, on_message: Callable[[Any], None]) -> None:
        self._on_message = on_message
        if self._transport is not None:
            self._transport.on_message = on_message

    @property
    def is_closed(self) -> bool:
        return self._closed

    def statistics(self) -> ConnectionStatistics:
        """Over all transports; what is sent again counts again. While it is away, all that is kept is unsent."""
        here = (
            self._transport.statistics()
            if self._transport is not None
            else ConnectionStatistics(0, 0, 0, 0, self.retransmit_buffer.nbytes)
        )
        a, b, c, d = self._before
        return ConnectionStatistics(
            a + here.messages_in, b + here.messages_out, c + here.bytes_in, d + here.bytes_out, here.unsent_bytes
        )
