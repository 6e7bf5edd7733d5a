"""A driver of links on an event loop: a connection that can have several sockets in succession.

The `wire.connection.Connection` of each socket is a transport. The `link.Link` decides what happens when a transport is
lost. The user of the connection does not notice that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from atoll.wire.connection import Connection, ConnectionStatistics
from atoll.wire.framing import MAX_LENGTH, frame_header, too_long
from atoll.wire.resumption.link import Link, LinkEvent, Retransmission
from atoll.wire.resumption.link import LinkState as S
from atoll.wire.resumption.link_messages import AnyLinkMessage

_encode = msgspec.msgpack.Encoder().encode

AnyLink = TypeVar("AnyLink", bound=Link)


class ResumableConnection(Generic[AnyLink]):
    """The base class of both ends, with the methods and handlers of `wire.connection.Connection`.

    `on_lost` runs when the connection itself is lost, not only its transport.
    """

    def __init__(self, link: AnyLink, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        self.link = link
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: Connection | None = None
        self._out: Connection | None = None  # the transport if the link writes
        self._before = [0, 0, 0, 0]  # statistics of earlier transports

    # ---- sending

    def send(self, message: Any) -> None:
        """Queue one message, or drop it if the connection has ended."""
        body = _encode(message)
        if len(body) > MAX_LENGTH:
            raise too_long(message, len(body))
        frame = frame_header(len(body)) + body
        if self.link.kept is None and self._out is not None:  # sending costs no more than with a plain connection
            self._out.send_encoded(frame)
        else:
            self.send_encoded(frame)

    def send_encoded(self, frame: bytes) -> None:
        kept = self.link.kept
        if kept is not None:  # `Link.send`, inlined
            kept.whole.append(frame)
            kept.nbytes += len(frame)
            if kept.nbytes > kept.limit:
                self._overflow()
        if self._out is not None:
            self._out.send_encoded(frame)

    def send_in_pieces(self, frame: bytes) -> None:
        if self.link.send_in_pieces(frame) and self._out is not None:
            self._out.send_in_pieces(frame)
        elif self.link.effects:
            self._end_soon()

    def _overflow(self) -> None:
        self.link.overflow()
        self._end_soon()

    def _end_soon(self) -> None:
        """Execute the effects of `send` soon, but not at once, because its callers do not expect `on_lost`."""
        self._out = None
        self._loop.call_soon(self._do_effects)

    # ---- effects of the link

    def _do_effects(self) -> None:
        self._out = self._transport if self.link.writes else None  # first, because handlers of events may send
        for effect in self.link.take_effects():
            transport = self._transport
            if isinstance(effect, LinkEvent):
                self._do(effect)
            elif transport is None:
                continue
            elif not isinstance(effect, Retransmission):
                transport.send_link(effect)
            elif effect.in_pieces:
                transport.send_in_pieces(effect.frame)
            else:
                transport.send_encoded(effect.frame)

    def _do(self, event: LinkEvent) -> None:
        if event in (LinkEvent.AWAY, LinkEvent.FAILED, LinkEvent.LOST):
            transport = self._release()
            if transport is not None:
                transport.abort()
        if event is LinkEvent.LOST:
            self._over()
            self._on_lost(self.link.reason)
        elif event is LinkEvent.CLOSED:
            transport = self._release()
            if transport is not None:
                transport.close()
            self._over()

    def _over(self) -> None:
        """Free the resources of a connection that is lost or closed."""

    # ---- transports

    def set_handlers(self, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        """Hand the connection over to other handlers, as `Connection.set_handlers` does."""
        self._on_message, self._on_lost = on_message, on_lost
        if not self.link.is_starting:
            self._receive_with(on_message)

    def _adopt(self, transport: Connection, on_message: Callable[[Any], None]) -> None:
        """Continue on a new transport, whose messages `on_message` receives."""
        old = self._release()
        if old is not None:
            old.abort()
        self._transport = transport
        transport.name = self.link.name
        self._receive_with(on_message)
        self._out = transport if self.link.writes else None

    def _receive_with(self, on_message: Callable[[Any], None]) -> None:
        """Make `on_message` receive the messages of the current transport, if there is one."""
        if self._transport is not None:
            handlers = on_message, self._transport_lost, self._receive_link
            if self.link.state is S.PLAIN:
                self._transport.set_handlers(*handlers)
            else:
                self._transport.set_handlers(*handlers, self.link.read, self._acknowledge_soon)

    def _transport_lost(self, reason: str) -> None:
        transport = self._release()
        if (transport is None or transport.is_broken) and self.link.state is not S.RESUMING:
            self.link.lose(reason)
        else:
            self.link.disconnect(self._loop.time(), reason)
        self._do_effects()

    def drop(self, reason: str) -> None:
        """Abort the current transport, if there is one."""
        self.link.disconnect(self._loop.time(), reason)
        self._do_effects()

    def _release(self) -> Connection | None:
        """Remove the current transport and return it."""
        transport = self._transport
        if transport is not None:
            counts = transport.statistics()
            here = counts.messages_in, counts.messages_out, counts.bytes_in, counts.bytes_out
            self._before = [a + b for a, b in zip(self._before, here, strict=True)]
            self._transport = self._out = None
        return transport

    def _receive_link(self, message: AnyLinkMessage) -> None:
        self.link.receive(message)
        self._do_effects()

    def _acknowledge_soon(self) -> None:
        self.acknowledge()

    def acknowledge(self) -> None:
        """Acknowledge all received messages. They must be safe even if this process ends."""
        self.link.acknowledge()
        self._do_effects()

    def close(self) -> None:
        """Send the queued messages if the peer reads them soon, and close without calling `on_lost`."""
        self.link.close()
        self._do_effects()

    # ---- properties

    @property
    def name(self) -> str:
        return self.link.name

    @name.setter
    def name(self, name: str) -> None:
        self.link.name = name
        if self._transport is not None:
            self._transport.name = name

    @property
    def is_away(self) -> bool:
        return self.link.is_away

    @property
    def is_closed(self) -> bool:
        return self.link.has_ended

    def statistics(self) -> ConnectionStatistics:
        """Return statistics over all transports. Retransmissions count again.

        While the connection is away, all kept bytes are unsent.
        """
        here = (
            self._transport.statistics()
            if self._transport is not None
            else ConnectionStatistics(0, 0, 0, 0, self.link.buffer.nbytes)
        )
        a, b, c, d = self._before
        return ConnectionStatistics(
            a + here.messages_in, b + here.messages_out, c + here.bytes_in, d + here.bytes_out, here.unsent_bytes
        )
