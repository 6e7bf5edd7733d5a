"""The connections of a page whose browser has not shown the key: few per address and in total, and for a short time."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from atoll.wire.sockets import peer_of
from atoll.wire.unauthenticated import UnauthenticatedConnections

MAX_PER_ADDRESS = 64
MAX_IN_ALL = 128
SECONDS = 10.0
MAX_HEAD = 16 * 1024  # of a request


class PageConnections:
    """The table of a server. uvicorn makes its connections with `protocol`."""

    def __init__(self, unauthenticated: UnauthenticatedConnections | None = None) -> None:
        self._unauthenticated = unauthenticated or UnauthenticatedConnections(MAX_IN_ALL, MAX_PER_ADDRESS, SECONDS)
        self._open: dict[Any, _Connection] = {}  # by the peer's address and port

    def protocol(self, *arguments: Any, **options: Any) -> H11Protocol:
        """Make a connection, with uvicorn's arguments."""
        return _Connection(self, *arguments, **options)

    def admit(self, client: Any) -> None:
        """Let the connection of this peer stay: it has the key, or asks for what is open to everyone."""
        connection = self._open.pop(_key(client), None)
        if connection is not None:
            self._unauthenticated.remove(connection)

    def opened(self, connection: _Connection) -> None:
        self._open[_key(connection.client)] = connection
        self._unauthenticated.add(connection, peer_of(connection.transport.get_extra_info("socket")))

    def closed(self, connection: _Connection) -> None:
        if self._open.get(_key(connection.client)) is connection:
            del self._open[_key(connection.client)]
        self._unauthenticated.remove(connection)


class _Connection(H11Protocol):
    def __init__(self, table: PageConnections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._table = table

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._table.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.closed(self)
        super().connection_lost(exc)

    def drop(self, reason: str) -> None:
        self.transport.abort()


def _key(client: Any) -> Any:
    return tuple(client) if client is not None else None
