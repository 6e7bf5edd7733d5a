"""The TLS handshake of a connection to a page. It counts among the connections that have not shown the key.

Servers of asyncio create no protocol before the handshake has ended, so they cannot bound the number of handshakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable

from atoll.wire.sockets import peer_of
from atoll.wire.unauthenticated import UnauthenticatedConnections


class TlsHandshake(asyncio.Protocol):
    """The first protocol of an accepted connection, which is replaced by the one of `make` after the handshake.

    `unauthenticated` counts the connection until then, and ends it if the handshake takes too long. The protocol of
    `make` counts itself.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.Protocol],
        unauthenticated: UnauthenticatedConnections,
    ) -> None:
        self._context = context
        self._make = make
        self._unauthenticated = unauthenticated
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.pause_reading()  # `start_tls` has to read the first bytes
        self._transport = transport
        self._unauthenticated.add(self, peer_of(transport.get_extra_info("socket")))
        self._task = asyncio.create_task(self._shake_hands(transport))

    def connection_lost(self, error: Exception | None) -> None:
        """End a handshake that has not begun."""
        if self._task is not None:
            self._task.cancel()

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        early = _Early()
        secured = None
        try:
            with contextlib.suppress(OSError):
                loop = asyncio.get_running_loop()
                secured = await loop.start_tls(transport, early, self._context, server_side=True)
        finally:
            self._unauthenticated.remove(self)
        if secured is None or early.is_lost:
            return
        protocol = self._make()
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        early.pass_on(protocol)

    def drop(self, reason: str) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()


class _Early(asyncio.Protocol):
    """Keeps what arrives together with the end of the handshake."""

    def __init__(self) -> None:
        self.is_lost = False
        self._content: list[bytes] = []
        self._has_ended = False

    def data_received(self, data: bytes) -> None:
        self._content.append(data)

    def eof_received(self) -> None:
        self._has_ended = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True

    def pass_on(self, protocol: asyncio.Protocol) -> None:
        for each in self._content:
            protocol.data_received(each)
        if self._has_ended:
            protocol.eof_received()
