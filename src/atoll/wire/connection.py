"""A framed, asynchronous message connection: the control plane on an event loop.

The frames are those of `wire.framing`. Sending never blocks and never awaits: messages queued during one iteration of
the event loop leave in one write, which is worth a factor of four at high rates. Reading uses one preallocated buffer
(a fresh one per read costs more than parsing).

Invariant: messages arrive whole, once, and in the order in which they were sent. A message that is sent in pieces
(`send_in_pieces`) arrives after all that was sent before it, also in pieces; what is sent whole after it may arrive
before it, and does where the peer is slow: pieces leave one at a time, behind whatever else there is, and only while
little is on its way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.errors import AtollError
from atoll.wire.framing import HEADER_BYTES, MAX_FIRST_FRAME, MAX_FRAME, FrameDecoder, FrameLimits, encode, piece_header
from atoll.wire.pieces import PIECE_BYTES, PieceQueue
from atoll.wire.resumption.link_messages import AnyLinkMessage, decode_link, encode_link
from atoll.wire.resumption.retransmit_buffer import Counts
from atoll.wire.sockets import credentials, keep_little_unsent, peer_of, read_what_is_left, send_without_delay
from atoll.wire.tls.identity import name_of, role_of
from atoll.wire.tls.layer import TlsLayer
from atoll.wire.tls.tls_errors import explained
from atoll.wire.unauthenticated import UnauthenticatedConnections

_log = logging.getLogger(__name__)

_READ_SIZE = 64 * 1024
# Of a connection that was accepted: the loop does nothing else until the messages of a read are handled. After a read
# of so many bytes, the next read is in the next turn of the loop. uvloop would do up to 32 of them in one turn.
ACCEPTED_READ_SIZE = 4 * 1024
MAX_UNSENT = 256 * 1024 * 1024
_CLOSE_SECONDS = 5.0  # for what is queued to leave: a peer that is silent would be waited for for minutes


@dataclass(frozen=True)
class ConnectionStatistics:
    """Counts since the connection was made; bytes are payload and headers."""

    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    unsent_bytes: int


# How a handshake begins, and how an alert: no first message of Atoll's is as long as they would say.
_TLS_RECORDS = frozenset(bytes((kind, 3, version)) for kind in (0x15, 0x16) for version in (1, 3))
_INSECURE = "one of the two was told to do without (--insecure, ATOLL_INSECURE), and the other was not"


class Connection(asyncio.BufferedProtocol):
    """One end of a control connection.

    `on_message(message)` runs on the loop's thread for each message, in order. `on_lost(reason)` runs once, when the
    connection ends for any reason but `close()`. An exception out of `on_message` ends the connection: a peer whose
    messages cannot be handled is not served any more. `on_made(connection)` runs before anything else, once the peer
    has proved who it is where it has to: `peer_role` and `peer_name` are then known. All methods are for the loop's
    thread.

    A connection that was accepted is one of the `unauthenticated` until `authenticated()` is called: its frames are
    small, and it may be dropped.

    `on_link(message)` gets what the peer says about the connection itself, and `on_read()` comes after each read: both
    are for `wire.resumption`, which makes one connection of several such.
    """

    def __init__(
        self,
        message_type: Any,
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        name: str = "peer",
        on_made: Callable[[Connection], None] | None = None,
        unauthenticated: UnauthenticatedConnections | None = None,
    ) -> None:
        self.name = name
        self.on_message = on_message
        self.on_lost = on_lost
        self.on_link: Callable[[AnyLinkMessage], None] = lambda message: None
        self.on_read: Callable[[], None] | None = None
        self.peer_role = self.peer_name = ""  # by its certificate; without TLS it has none
        self.is_broken = False  # it has ended by what one of the two did, not by the loss of its socket
        self._on_made = on_made
        self._unauthenticated = unauthenticated
        self._limits: FrameLimits | None = None
        self._decoder = self._new_decoder(message_type)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._full_read = 0 if unauthenticated is None else ACCEPTED_READ_SIZE  # bytes; 0: all reads are alike
        self._read_buffer = bytearray(self._full_read or _READ_SIZE)
        self._read_view = memoryview(self._read_buffer)
        self._outgoing = bytearray()
        self._flush_scheduled = False
        self._large = PieceQueue()
        self._is_full = False  # of what the peer has not taken
        self._closed = False
        self.messages_in = self._messages_out = self.bytes_in = self._bytes_out = 0

    # ---- sending

    def send(self, message: Any) -> None:
        """Queues one message. Never blocks; a message for a connection that has ended is dropped."""
        if not self._closed:
            self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        """The same for a message that `encode` has made a frame of, once for many connections."""
        if self._closed:
            return
        self._outgoing += frame
        self._messages_out += 1
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def send_link(self, message: AnyLinkMessage) -> None:
        """Queues something about the connection itself."""
        if not self._closed:
            self._outgoing += encode_link(message)
            self._flush_soon()

    def send_in_pieces(self, frame: bytes) -> None:
        """As `send_encoded`, for what may be overtaken: nothing that is sent from now on relies on its being there.

        Who needs to know when it is there has the peer answer.
        """
        if self._closed:
            return
        self._large.put(memoryview(frame)[HEADER_BYTES:])
        self._messages_out += 1
        self._flush_soon()

    def _flush(self) -> None:
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
            self._break(f"{self.name} does not read: {MAX_UNSENT >> 20} MiB are waiting for it")

    def flush(self) -> None:
        """Hands what is queued to the kernel, before anything that other connections have not handed over yet."""
        self._flush()

    def _send_piece(self, transport: asyncio.Transport) -> None:
        """One a turn of the loop, which has other things to do."""
        piece, is_last = self._large.take()
        header = piece_header(len(piece), is_last)
        self._bytes_out += len(header) + len(piece)
        transport.write(header + piece)
        if self._large.nbytes:
            self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

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
        self._flush()

    def expect(self, message_type: Any, on_message: Callable[[Any], None]) -> None:
        """The peer's messages are of this type from now on; before the first of them."""
        self._decoder, self.on_message = self._new_decoder(message_type), on_message

    def _new_decoder(self, message_type: Any) -> FrameDecoder:
        limit = MAX_FRAME if self._unauthenticated is None else MAX_FIRST_FRAME
        return FrameDecoder(message_type, limit, on_link=self._link)

    def limit_frames(self, limits: FrameLimits | None) -> None:
        """Limit the frames of the peer once it is authenticated; with None by `MAX_FRAME` only."""
        self._limits = limits

    def authenticated(self) -> None:
        """The peer has proved who it is: it may send large messages from now on, also the next one."""
        if self._unauthenticated is not None:
            self._unauthenticated.remove(self)
            self._unauthenticated = None
            self._decoder.limit = MAX_FRAME
            if self._limits is not None:
                self._decoder.set_limits(self._limits)

    @property
    def is_authenticated(self) -> bool:
        return self._unauthenticated is None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_view

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        if not self.messages_in and bytes(self._read_view[:3]) in _TLS_RECORDS:
            self._break(f"{self.name} speaks TLS, and this side does not: {_INSECURE}")
            return
        try:
            for message in self._decoder.feed(self._read_view[:nbytes]):
                if self._closed:
                    return
                self.messages_in += 1
                self.on_message(message)
        except AtollError as error:
            self._break(f"{self.name} sent what we do not understand: {error}")
        except Exception as error:
            _log.exception("handling a message of %s failed", self.name)
            self._break(f"handling a message of {self.name} failed: {error}")
        if self.on_read is not None:
            self.on_read()
        if nbytes == self._full_read and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _link(self, content: memoryview) -> None:
        message = decode_link(content)
        if not self._closed:
            self.on_link(message)

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
        """Drop references to objects that refer to this connection: nothing comes of it any more.

        Otherwise ended connections, with their buffers, wait for the garbage collector, which takes long for many.
        """
        self.on_message, self.on_lost, self.on_link = _ignore, _ignore, _ignore
        self.on_read = self._on_made = self._transport = None
        self._decoder.end()
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
        self.on_lost(reason)

    def _break(self, reason: str) -> None:
        self.is_broken = True
        self.refuse(reason)
        self._lose(reason)

    def drop(self, reason: str) -> None:
        """Ends at once, as if the peer had closed."""
        self._lose(reason)

    def refuse(self, reason: str) -> None:
        """Log why a peer that is not authenticated is refused; does nothing for one that is."""
        if self._unauthenticated is not None and not self._closed:
            self._unauthenticated.refused(self.peer, reason)

    def abort(self) -> None:
        """Closes at once, whatever is queued; `on_lost` is not called."""
        self.on_lost = lambda reason: None
        self._lose("")

    def close(self) -> None:
        """Sends what is queued, where the peer takes it soon, and closes; `on_lost` is not called.

        What is sent in pieces, and has not left by now, does not leave any more.
        """
        if self._closed:
            return
        self._large.clear()
        self._flush()
        self._closed = True
        if self._unauthenticated is not None:
            self._unauthenticated.remove(self)
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(_CLOSE_SECONDS, self._transport.abort)

    def close_with(self, message: AnyLinkMessage) -> None:
        """Sends this in place of what is queued, and closes; `on_lost` is not called."""
        self._outgoing.clear()
        self.send_link(message)
        self.close()

    @property
    def local_host(self) -> str:
        """The address of this machine that the connection uses; "" for a unix socket."""
        return self._host("sockname")

    @property
    def peer_host(self) -> str:
        """The address at which the peer was reached; "" for a unix socket."""
        return self._host("peername")

    @property
    def peer(self) -> str:
        """The peer's address, or the user of a unix socket, for logs and bounds."""
        return peer_of(self._transport.get_extra_info("socket")) if self._transport is not None else ""

    @property
    def peer_port(self) -> int:
        """The port at which the peer was reached; 0 for a unix socket."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return int(name[1]) if isinstance(name, tuple) else 0

    @property
    def peer_pid(self) -> int:
        """The peer's process, by the kernel's word; 0 where it may be on another machine."""
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

    @property
    def received(self) -> Counts:
        """How many messages have come, whole and in pieces."""
        return Counts(self.messages_in - self._decoder.pieced, self._decoder.pieced)

    def statistics(self) -> ConnectionStatistics:
        unsent = len(self._outgoing) + self._large.nbytes
        if self._transport is not None and not self._closed:
            unsent += self._transport.get_write_buffer_size()
        return ConnectionStatistics(self.messages_in, self._messages_out, self.bytes_in, self._bytes_out, unsent)


def _ignore(message: Any) -> None:
    """Do nothing for a connection that has ended."""
