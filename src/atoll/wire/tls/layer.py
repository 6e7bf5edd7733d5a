"""TLS between an event loop's transport and a protocol: below it is the socket, above it a control connection.

The loops' own TLS would do, but for two things. Where a peer's certificate is refused they close without the alert that
says why, so nobody could tell its user; and a listener's certificate could not be renewed.
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
_LEAST_RECORD = 22  # bytes of a record of TLS 1.3 that has anything in it


class TlsLayer(asyncio.BufferedProtocol):
    """A protocol to the socket's transport, and a transport to the protocol that `factory` makes after the handshake.

    `role` is what the peer has to be, for who dials; "" for who was dialed. `on_secured(error)` is called once: with
    None when the handshake is done, else with what is wrong, and then the connection has ended. A handshake that is not
    done within `seconds` is such an end. An accepted connection is one of the `unauthenticated` until then.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        role: str,
        factory: Callable[[], Any],
        seconds: float,
        who: str,
        on_secured: Callable[[ConnectError | None], None],
        unauthenticated: UnauthenticatedConnections | None = None,
    ) -> None:
        self.protocol: Any = None
        self._role = role
        self._unauthenticated = unauthenticated
        self.peer = ""  # address, of a connection that was accepted
        self._factory = factory
        self._who = who
        self._on_secured: Callable[[ConnectError | None], None] | None = on_secured
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=not role, server_hostname=server_name(role) if role else None
        )
        self._read, self._write = self._tls.read, self._tls.write
        self._encrypted = memoryview(bytearray(_READ_SIZE))
        self._plain = memoryview(b"")  # the protocol's buffer, which is always the same
        self._is_paused = False  # by the protocol
        self._is_lost = False  # and what has arrived is delivered at once
        self._error: Exception | None = None
        self._transport: asyncio.Transport
        self._seconds = seconds
        self._deadline: asyncio.TimerHandle

    # ---- below: what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._send = self._transport.write
        # Not before: a loop may make the protocol of a connection that never is.
        self._deadline = asyncio.get_running_loop().call_later(self._seconds, self._too_late)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            send_without_delay(sock)  # before the handshake, which waits for acknowledgements otherwise
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
        if self.protocol is not None and self._incoming.pending >= _LEAST_RECORD:
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
        # As `Connection` does, and for the same reason.
        self._encrypted = self._plain = memoryview(b"")
        self.protocol = None

    # ---- the handshake

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            # An alert tells the peer why.
            self._transport.write(self._outgoing.read() or ALERT)
            self._fail(error)
            self._transport.close()
            return
        self._flush()
        self._forget()
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
        self._forget()
        on_secured, self._on_secured = self._on_secured, None
        if on_secured is not None:
            on_secured(explained(error, self._who) if self._role else not_admitted(error, self._who))

    def _forget(self) -> None:
        """The handshake is over: the connection above, if it is made, counts from now on."""
        self._deadline.cancel()
        if self._unauthenticated is not None:
            self._unauthenticated.remove(self)

    def drop(self, reason: str) -> None:
        """End a connection whose handshake takes too long, or that exceeds a bound."""
        self._forget()
        self._on_secured = None
        self._transport.abort()

    def _flush(self) -> None:
        encrypted = self._outgoing.read()
        if encrypted:
            self._transport.write(encrypted)

    # ---- bytes

    def _deliver(self) -> None:
        """Gives the protocol what has arrived. To ask in vain costs more than a small message: so it looks first."""
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
                if count < size and incoming.pending < _LEAST_RECORD:
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
        if self._outgoing.pending:  # an answer to an update of keys
            self._flush()

    # ---- above: what the protocol calls

    def write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._write(data)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return  # the peer has closed, which the protocol learns next: what is written now is lost either way
        except ssl.SSLError as error:
            self._error = error
            self._transport.abort()
            return
        self._send(self._outgoing.read())

    def pause_reading(self) -> None:
        """Deliver nothing more, and read nothing, until `resume_reading`."""
        if not (self._is_paused or self._is_lost):
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_paused:
            return
        self._is_paused = False
        if self._tls.pending() or self._incoming.pending >= _LEAST_RECORD:
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
        """Sends what was written, and closes."""
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
