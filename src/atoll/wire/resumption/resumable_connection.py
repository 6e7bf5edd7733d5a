"""One end of a control connection that can have several sockets in succession, on an event loop.

The `wire.connection.Connection` of each socket is a *transport*. Between two transports, the connection is *away*: it
keeps messages and sends them on the next transport. Its user does not notice this.

Invariant: each message arrives once and in order, or the connection is lost and `on_lost` runs at both ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from atoll.wire.connection import Connection, ConnectionStatistics
from atoll.wire.framing import encode
from atoll.wire.resumption.link_messages import (
    ACKNOWLEDGE_BYTES,
    ACKNOWLEDGE_MESSAGES,
    Acknowledge,
    AnyLinkMessage,
    Close,
)
from atoll.wire.resumption.retransmit_buffer import MAX_RETAINED, NONE, Counts, RetransmitBuffer


class ResumableConnection:
    """The base class of both ends, with the methods and handlers of `wire.connection.Connection`.

    `on_lost` runs when the connection itself is lost, not only its transport. Subclasses handle a lost transport
    (`_went_away`) and adopt the next one.
    """

    def __init__(
        self,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
        name: str,
        retransmit_buffer: RetransmitBuffer | None = None,
    ) -> None:
        self._on_lost = on_lost
        self.retransmit_buffer = retransmit_buffer or RetransmitBuffer()
        self._name = name
        self._on_message = on_message
        self._transport: Connection | None = None
        self._out: Connection | None = None  # the transport if sending is allowed
        self._closed = False
        self._acknowledges = True  # what it reads, since the peer retains it
        self._acknowledged = Counts()  # last counts sent to the peer
        self._due = (0, 0)  # messages and bytes of this transport at which to acknowledge
        self._before = [0, 0, 0, 0]  # statistics of earlier transports

    # ---- sending

    def send(self, message: Any) -> None:
        """Queue one message, or drop it if the connection has ended."""
        if not self._closed:
            self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        if self._closed:
            return
        retransmit_buffer = self.retransmit_buffer  # `retain`, inlined because every message takes this path
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
        """Lose the connection soon, but not at once, because callers of `send` do not expect `on_lost`."""
        reason = f"{self._name} has not acknowledged {MAX_RETAINED >> 20} MiB of messages"
        asyncio.get_running_loop().call_soon(self._lose, reason)

    # ---- transports

    def set_handlers(self, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        """Hand the connection over to other handlers, as `Connection.set_handlers` does."""
        self._on_message, self._on_lost = on_message, on_lost
        self._receive_with(on_message)

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
        self._receive_with(self._on_message)

    def _receive_with(self, on_message: Callable[[Any], None]) -> None:
        """Make `on_message` receive the messages of the current transport, if there is one."""
        if self._transport is not None:
            self._transport.set_handlers(
                on_message, self._transport_lost, self._link, self._read if self._acknowledges else None
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
        """Handle the loss of the transport, which the connection may survive."""
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
        """Acknowledge all received messages. They must be safe even if this process ends."""
        if self._out is not None:
            self._acknowledged = self.received
            self._out.send_link(Acknowledge(*self._acknowledged))

    # ---- closing

    def _lose(self, reason: str) -> None:
        """End the connection, and call `on_lost`."""
        if self._closed:
            return
        self._closed = True
        transport = self._release()
        if transport is not None:
            transport.abort()
        self._over()
        self._on_lost(reason)

    def close(self) -> None:
        """Send the queued messages if the peer reads them soon, and close without calling `on_lost`."""
        if self._closed:
            return
        self._closed = True
        transport = self._release()
        if transport is not None:
            transport.send_link(Close())
            transport.close()
        self._over()

    def _over(self) -> None:
        """Free the resources of a connection that is lost or closed."""
        self.retransmit_buffer = RetransmitBuffer()

    # ---- properties

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        if self._transport is not None:
            self._transport.name = name

    @property
    def is_closed(self) -> bool:
        return self._closed

    def statistics(self) -> ConnectionStatistics:
        """Return statistics over all transports. Retransmissions count again.

        While the connection is away, all kept bytes are unsent.
        """
        here = (
            self._transport.statistics()
            if self._transport is not None
            else ConnectionStatistics(0, 0, 0, 0, self.retransmit_buffer.nbytes)
        )
        a, b, c, d = self._before
        return ConnectionStatistics(
            a + here.messages_in, b + here.messages_out, c + here.bytes_in, d + here.bytes_out, here.unsent_bytes
        )
