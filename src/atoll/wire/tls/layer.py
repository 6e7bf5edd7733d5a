"""TLS between a socket's transport on an event loop and a control connection.

This replaces the TLS of event loops, which has two problems. If a loop refuses a peer's certificate, it closes the
connection without sending the alert that states the reason. It also cannot renew the certificate of a listener.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from atoll.errors import ConnectError
from atoll.wire.sockets import peer_of, read_what_is_left, send_without_delay
from atoll.wire.tls.identity import server_name
from atoll.wire.tls.tls_errors import ALERT, explained, not_admitted
from atoll.wire.unauthenticated import UnauthenticatedConnections

_READ_SIZE = 64 * 1024
_MIN_RECORD = 22  # bytes of the smallest TLS 1.3 record with content


class TlsLayer(asyncio.BufferedProtocol):
    """The protocol of the socket's transport, and the transport of the protocol that `factory` creates.

    The layer calls `factory` after the handshake. A dialer passes the `role` that the peer must have, and an acceptor
    passes "". The layer calls `on_secured(error)` once: with None after the handshake, or with the error if the
    handshake fails or takes more than `seconds`. In the latter case, the connection has ended. `unauthenticated` counts
    an accepted connection until the handshake ends. Errors name the peer as `target`.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        role: str,
        factory: Callable[[], Any],
        seconds: float,
        target: str,
        on_secured: Callable[[ConnectError | None], None],
        unauthenticated: UnauthenticatedConnections | None = None,
    ) -> None:
        self.protocol: Any = None
        self._role = role
        self._unauthenticated = unauthenticated
        self.peer = ""  # address of the peer of an accepted connection
        self._factory = factory
        self._target = target
        self._on_secured: Callable[[ConnectError | None], None] | None = on_secured
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=not role, server_hostname=server_name(role) if role else None
        )
        self._read, self._write = self._tls.read, self._tls.write
        self._encrypted = memoryview(bytearray(_READ_SIZE))
        self._plain = memoryview(b"")  # the protocol's buffer, which does not change
        self._is_paused = False  # by the protocol
        self._is_lost = False  # received bytes are delivered even if the protocol pauses
        self._error: Exception | None = None
        # Until the connection is made, a transport whose methods raise NotImplementedError.
        self._transport = asyncio.Transport()
        self._send = self._transport.write
        self._seconds = seconds
        self._deadline: asyncio.TimerHandle | None = None

    # ---- protocol: called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._send = self._transport.write
        # Not in the constructor, because a loop may create a protocol without a connection.
        self._deadline = asyncio.get_running_loop().call_later(self._seconds, self._too_late)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            send_without_delay(sock)  # before the handshake, which would wait for acknowledgements otherwise
        if self._unauthenticated is not None:
            self.peer = peer_of(sock)
            self._unauthenticated.add(self, self.peer)
        self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._encrypted

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(self._encrypted[:nbytes])
        if self._on_secured is not None:
            self._shake_hands()
        if self.protocol is not None and self._incoming.pending >= _MIN_RECORD:
            self._deliver()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self.protocol is not None:
            self.protocol.pause_writing()

    def resume_writing(self) -> None:
        if self.protocol is not None:
            self.protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._on_secured is not None:
            self._fail(error or ConnectionResetError())
        elif self.protocol is not None:
            self._is_lost = True
            if self._is_paused:
                self._is_paused = False
                self._deliver()
            if isinstance(error, OSError) and self._error is None:
                read_what_is_left(self._transport, self)
            self.protocol.connection_lost(self._error or error)
        # Break reference cycles; see `Connection._break_cycles`.
        self._encrypted = self._plain = memoryview(b"")
        self.protocol = None

    # ---- handshake

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            # The alert states the reason to the peer.
            self._transport.write(self._outgoing.read() or ALERT)
            self._fail(error)
            self._transport.close()
            return
        self._flush()
        self._end_handshake()
        on_secured, self._on_secured = self._on_secured, None
        self.protocol = self._factory()
        self._plain = self.protocol.get_buffer(-1)
        self.protocol.connection_made(self)
        if on_secured is not None:
            on_secured(None)

    def _too_late(self) -> None:
        self._fail(TimeoutError())
        self._transport.abort()

    def _fail(self, error: Exception) -> None:
        self._end_handshake()
        on_secured, self._on_secured = self._on_secured, None
        if on_secured is not None:
            on_secured(explained(error, self._target) if self._role else not_admitted(error, self._target))

    def _end_handshake(self) -> None:
        """Cancel the deadline and remove the layer from `unauthenticated`. The control connection adds itself."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._unauthenticated is not None:
            self._unauthenticated.remove(self)

    def drop(self, reason: str) -> None:
        """End a connection whose handshake takes too long or that exceeds a bound."""
        self._end_handshake()
        self._on_secured = None
        self._transport.abort()

    def _flush(self) -> None:
        encrypted = self._outgoing.read()
        if encrypted:
            self._transport.write(encrypted)

    # ---- bytes

    def _deliver(self) -> None:
        """Decrypt received bytes and pass them to the protocol.

        A read without a complete record raises, which costs more than a small message, so check for records first.
        """
        read, incoming, plain, take = self._read, self._incoming, self._plain, self.protocol.buffer_updated
        size = len(plain)
        try:
            while True:
                count: Any = read(size, plain)
                if not count:
                    self._transport.close()
                    return
                take(count)
                if self._is_paused:
                    break
                if count < size and incoming.pending < _MIN_RECORD:
                    break
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._transport.close()
            return
        except ssl.SSLError as error:
            self._error = error
            self._transport.abort()
            return
        if self._outgoing.pending:  # an answer to a key update
            self._flush()

    # ---- transport: called by the protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._write(data)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return  # the peer has closed, so the bytes are lost; `connection_lost` of the protocol follows
        except ssl.SSLError as error:
            self._error = error
            self._transport.abort()
            return
        self._send(self._outgoing.read())

    def pause_reading(self) -> None:
        """Stop reading and delivering until `resume_reading`."""
        if not (self._is_paused or self._is_lost):
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_paused:
            return
        self._is_paused = False
        if self._tls.pending() or self._incoming.pending >= _MIN_RECORD:
            self._deliver()
        if not (self._is_paused or self._transport.is_closing()):
            self._transport.resume_reading()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int) -> None:
        self._transport.set_write_buffer_limits(high)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls.getpeercert() if name == "peercert" else self._transport.get_extra_info(name, default)

    def close(self) -> None:
        """Send all written bytes and close."""
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
