"""A control connection on an event loop, which sends and receives the frames of `wire.framing`.

Sending never blocks. Messages that are queued during one iteration of the event loop are sent in one write, which is
four times as fast at high rates. Reading uses one preallocated buffer, because allocating one per read costs more than
parsing.

Invariant: messages arrive complete, once, and in the order in which they were sent, with one exception. Later messages
can overtake a message that is sent in pieces (`send_in_pieces`), and do so if the peer is slow: the connection sends
one piece at a time, after all queued messages, and only while few bytes are unsent. Messages in pieces keep their order
among themselves.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.errors import AtollError, FrameError
from atoll.wire.framing import (
    HEADER_BYTES,
    MAX_FIRST_FRAME,
    MAX_FRAME,
    PIECE_BYTES,
    FrameDecoder,
    FrameLimits,
    PieceQueue,
    encode,
    piece_header,
)
from atoll.wire.resumption.link_messages import AnyLinkMessage, decode_link, encode_link
from atoll.wire.sockets import credentials, keep_little_unsent, peer_of, read_what_is_left, send_without_delay
from atoll.wire.tls.identity import name_of, role_of
from atoll.wire.tls.layer import TlsLayer
from atoll.wire.tls.tls_errors import explained
from atoll.wire.unauthenticated import UnauthenticatedConnections

_log = logging.getLogger(__name__)

_READ_SIZE = 64 * 1024
# Read size of an accepted connection. The loop is blocked until the messages of a read are handled, so a full read
# delays the next one to the next iteration of the loop. uvloop would otherwise do up to 32 reads per iteration.
ACCEPTED_READ_SIZE = 4 * 1024
MAX_UNSENT = 256 * 1024 * 1024
_CLOSE_SECONDS = 5.0  # time to send queued bytes; without it, closing would wait for minutes if the peer is silent


class ConnectionStatistics(msgspec.Struct, frozen=True):
    """Counts since the connection was made. Bytes include headers."""

    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    unsent_bytes: int


# First bytes of TLS handshakes and alerts. As a frame's length, they would exceed all first messages of Atoll.
_TLS_RECORDS = frozenset(bytes((kind, 3, version)) for kind in (0x15, 0x16) for version in (1, 3))
_INSECURE = "one side was started with --insecure (ATOLL_INSECURE), and the other was not"


class Connection(asyncio.BufferedProtocol):
    """One end of a control connection, used only on the event loop's thread.

    `on_made(connection)` runs first, after the TLS handshake if there is one; `peer_role` and `peer_name` are then
    known. `on_message(message)` runs for each message, in order. If it raises, the connection ends. `on_lost(reason)`
    runs once when the connection ends, unless `close` or `abort` ended it.

    `unauthenticated` counts an accepted connection until `authenticated()` is called. Until then, the peer can send
    only small frames, and the connection may be dropped.

    `on_link(message)` receives link messages; see `wire.resumption`. If there is no `on_link`, a link message of an
    unauthenticated peer ends the connection, and the connection ignores those of other peers.
    """

    def __init__(
        self,
        message_type: Any,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        name: str = "peer",
        on_made: Callable[[Connection], None] | None = None,
        on_link: Callable[[AnyLinkMessage], None] | None = None,
        unauthenticated: UnauthenticatedConnections | None = None,
    ) -> None:
        self.name = name
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_link: Callable[[AnyLinkMessage], None] | None = on_link
        self._on_read: Callable[[int], bool] | None = None
        self._on_due: Callable[[], None] = _nothing
        self.peer_role = self.peer_name = ""  # from the peer's certificate; "" without TLS
        self.is_broken = False  # an error of one side ended the connection, not the loss of its socket
        self._on_made = on_made
        self._unauthenticated = unauthenticated
        self._limits: FrameLimits | None = None
        self.decoder = self._new_decoder(message_type)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._full_read = 0 if unauthenticated is None else ACCEPTED_READ_SIZE  # 0: do not delay reads
        self._read_buffer = bytearray(self._full_read or _READ_SIZE)
        self._read_view = memoryview(self._read_buffer)
        self._outgoing = bytearray()
        self._flush_scheduled = False
        self._large = PieceQueue()
        self._is_full = False  # the transport's buffer is full
        self._closed = False
        self._messages_out = self.bytes_in = self._bytes_out = 0

    # ---- sending

    def send(self, message: Any) -> None:
        """Queue one message, or drop it if the connection has ended."""
        if not self._closed:
            self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        """Queue one message that is already encoded as a frame, for example once for many connections."""
        if self._closed:
            return
        self._outgoing += frame
        self._messages_out += 1
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def send_link(self, message: AnyLinkMessage) -> None:
        """Queue a link message."""
        if not self._closed:
            self._outgoing += encode_link(message)
            self._flush_soon()

    def send_in_pieces(self, frame: bytes) -> None:
        """Queue an encoded message that later messages may overtake, and send it in pieces.

        The peer must reply if the sender needs to know when the message has arrived.
        """
        if self._closed:
            return
        self._large.put(memoryview(frame)[HEADER_BYTES:])
        self._messages_out += 1
        self._flush_soon()

    def flush(self) -> None:
        """Write the queued messages now, before those of other connections."""
        self._flush_scheduled = False
        if self._transport is None or self._closed:
            return
        if self._outgoing:
            data, self._outgoing = self._outgoing, bytearray()
            self._bytes_out += len(data)
            self._transport.write(data)
        if self._large.nbytes and not self._is_full:
            self._send_piece(self._transport)
        if self._transport.get_write_buffer_size() + self._large.nbytes > MAX_UNSENT:
            self._break(f"{self.name} does not read: {MAX_UNSENT >> 20} MiB are unsent")

    def _send_piece(self, transport: asyncio.Transport) -> None:
        """Send one piece, and schedule the next one for the next iteration of the loop."""
        piece, is_last = self._large.take()
        header = piece_header(len(piece), is_last)
        self._bytes_out += len(header) + len(piece)
        transport.write(header + piece)
        if self._large.nbytes:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._flush_soon()

    # ---- receiving (called by asyncio)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        sock = transport.get_extra_info("socket")
        if sock is not None:
            send_without_delay(sock)
            keep_little_unsent(sock)
        transport.set_write_buffer_limits(PIECE_BYTES)  # type: ignore[attr-defined]
        certificate = transport.get_extra_info("peercert")
        self.peer_role, self.peer_name = role_of(certificate), name_of(certificate)
        if self._unauthenticated is not None:
            self._unauthenticated.add(self, self.peer)
        if self._on_made is not None:
            self._on_made(self)
        self.flush()

    def set_handlers(
        self,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
        on_link: Callable[[AnyLinkMessage], None] | None = None,
        on_read: Callable[[int], bool] | None = None,
        on_due: Callable[[], None] | None = None,
    ) -> None:
        """Hand the connection over to other handlers, as asyncio's transports do with a new protocol.

        They replace all handlers, from the next message of the current read on. `on_read(nbytes)` runs after each
        read of that many bytes.
        """
        self._on_message, self._on_lost, self._on_link = on_message, on_lost, on_link
        self._on_read, self._on_due = on_read, on_due or _nothing

    def ignore(self) -> None:
        """Call no handlers anymore."""
        self.set_handlers(_ignore, _ignore, _ignore)

    def expect(self, message_type: Any, on_message: Callable[[Any], None], on_lost: Callable[[str], None]) -> None:
        """Hand the connection over to handlers of another type of messages. Call this before the first message."""
        self.decoder = self._new_decoder(message_type)
        self.set_handlers(on_message, on_lost)

    def _new_decoder(self, message_type: Any) -> FrameDecoder:
        limit = MAX_FRAME if self._unauthenticated is None else MAX_FIRST_FRAME
        return FrameDecoder(message_type, limit, on_link=self._link)

    def limit_frames(self, limits: FrameLimits | None) -> None:
        """Set the limits for the peer's frames after authentication. None stands for `MAX_FRAME`."""
        self._limits = limits

    def authenticated(self) -> None:
        """Mark the peer as authenticated, so that it can send large messages, starting with the next one."""
        if self._unauthenticated is not None:
            self._unauthenticated.remove(self)
            self._unauthenticated = None
            self.decoder.limit = MAX_FRAME
            if self._limits is not None:
                self.decoder.set_limits(self._limits)

    @property
    def is_authenticated(self) -> bool:
        return self._unauthenticated is None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_view

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        if not self.decoder.messages and bytes(self._read_view[:3]) in _TLS_RECORDS:
            self._break(f"{self.name} uses TLS, and this side does not: {_INSECURE}")
            return
        try:
            for message in self.decoder.feed(self._read_view[:nbytes]):
                if self._closed:
                    return
                self._on_message(message)
        except AtollError as error:
            self._break(f"{self.name} sent invalid data: {error}")
        except Exception as error:
            _log.exception("cannot handle a message from %s", self.name)
            self._break(f"cannot handle a message from {self.name}: {error}")
        if self._on_read is not None and self._on_read(nbytes):
            self._on_due()
        if nbytes == self._full_read and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._loop.call_soon(self._resume_reading)

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _link(self, content: memoryview) -> None:
        message = decode_link(content)
        if self._closed:
            return
        if self._on_link is not None:
            self._on_link(message)
        elif self._unauthenticated is not None:
            raise FrameError(f"a {type(message).__name__} is not expected from this peer")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        transport = self._transport
        self._full_read = 0
        if isinstance(error, OSError) and not (self._closed or transport is None or isinstance(transport, TlsLayer)):
            read_what_is_left(transport, self)
        if isinstance(error, ssl.SSLError):
            self._lose(str(explained(error, self.name, shaking_hands=False)))
        else:
            self._lose(f"{self.name} closed the connection" + (f": {error}" if error else ""))
        self._break_cycles()

    def _break_cycles(self) -> None:
        """Drop references to objects that refer to this connection.

        Otherwise, ended connections and their buffers would stay until the garbage collector runs, which takes long if
        there are many.
        """
        self.ignore()
        self._on_made = self._transport = None
        self.decoder.end()
        self._read_buffer, self._read_view = bytearray(), memoryview(b"")

    # ---- ending

    def _lose(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._large.clear()
        if self._unauthenticated is not None:
            self._unauthenticated.remove(self)
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(reason)

    def _break(self, reason: str) -> None:
        self.is_broken = True
        self.refuse(reason)
        self._lose(reason)

    def drop(self, reason: str) -> None:
        """End the connection at once, as if the peer had closed it."""
        self._lose(reason)

    def refuse(self, reason: str) -> None:
        """Log why the peer is refused, unless it is authenticated."""
        if self._unauthenticated is not None and not self._closed:
            self._unauthenticated.refused(self.peer, reason)

    def abort(self) -> None:
        """Close at once without sending queued messages or calling `on_lost`."""
        self._on_lost = _ignore
        self._lose("")

    def close(self) -> None:
        """Send the queued messages if the peer reads them soon, and close without calling `on_lost`.

        Drop the rest of messages in pieces.
        """
        if self._closed:
            return
        self._large.clear()
        self.flush()
        self._closed = True
        if self._unauthenticated is not None:
            self._unauthenticated.remove(self)
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(_CLOSE_SECONDS, self._transport.abort)

    def close_with(self, message: AnyLinkMessage) -> None:
        """Drop the queued messages, send `message`, and close without calling `on_lost`."""
        self.drop_queued()
        self.send_link(message)
        self.close()

    def drop_queued(self) -> None:
        """Drop the queued messages."""
        self._outgoing.clear()

    @property
    def local_host(self) -> str:
        """The IP address of this side; "" for a unix socket."""
        return self._host("sockname")

    @property
    def peer_host(self) -> str:
        """The IP address of the peer; "" for a unix socket."""
        return self._host("peername")

    @property
    def peer(self) -> str:
        """The peer's IP address or the user of a unix socket, for logs and bounds."""
        return peer_of(self._transport.get_extra_info("socket")) if self._transport is not None else ""

    @property
    def peer_port(self) -> int:
        """The port of the peer; 0 for a unix socket."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return int(name[1]) if isinstance(name, tuple) else 0

    @property
    def peer_pid(self) -> int:
        """The peer's process ID according to the kernel; 0 if the peer may be on another machine."""
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is None or sock.family != socket.AF_UNIX:
            return 0
        return credentials(sock)[0]

    def _host(self, which: str) -> str:
        name = self._transport.get_extra_info(which) if self._transport is not None else None
        return str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else ""

    @property
    def is_closed(self) -> bool:
        return self._closed

    def statistics(self) -> ConnectionStatistics:
        unsent = len(self._outgoing) + self._large.nbytes
        if self._transport is not None and not self._closed:
            unsent += self._transport.get_write_buffer_size()
        return ConnectionStatistics(self.decoder.messages, self._messages_out, self.bytes_in, self._bytes_out, unsent)


def _nothing() -> None:
    """Do nothing."""


def _ignore(message: Any) -> None:
    """Do nothing. This is the callback of a connection that has ended."""
