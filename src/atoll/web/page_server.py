"""The web server of the page: NiceGUI on uvicorn, behind the key."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from nicegui import ui
from uvicorn.protocols.http.h11_impl import H11Protocol

from atoll.cluster.processes.process_runtime import ending_signals
from atoll.web.metrics_server import listening_socket, metrics_answer
from atoll.web.page_key import METRICS, KeyGuard
from atoll.web.pages import register_pages
from atoll.web.poller import Poller
from atoll.web.tls import PageTls
from atoll.web.tls_handshake import TlsHandshake
from atoll.wire.address import Address
from atoll.wire.sockets import peer_of
from atoll.wire.unauthenticated import UnauthenticatedConnections

# Bounds of connections that have not shown the key.
MAX_PER_ADDRESS = 64
MAX_IN_ALL = 128
SECONDS = 10.0
MAX_HEAD = 16 * 1024  # bytes of a request's head
_END_SECONDS = 3  # for closing browsers' connections


async def serve_page(
    poller: Poller, address: Address, key: str, listening: Callable[[int], None], tls: PageTls | None = None
) -> None:
    """Serve until SIGINT or one of the `ending_signals`. Calls `listening(port)` first. Call it once per process.

    Raises AddressError if it cannot listen.
    """
    sock = listening_socket(address)
    port = sock.getsockname()[1]
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    async def metrics(request: Request) -> Response:
        status, content_type, body = await metrics_answer(poller, request.headers.get("accept", ""))
        return Response(body, int(status.split()[0]), {"content-type": content_type})

    app.add_api_route(METRICS, metrics, methods=["GET"])
    register_pages(poller)
    ui.run_with(
        app,
        title=f"Atoll: {poller.source.name}",
        dark=None,
        tailwind=False,
        show_welcome_message=False,
        binding_refresh_interval=None,
    )
    open_paths = frozenset({METRICS}) if address.is_local else frozenset[str]()
    connections = PageConnections(context=tls.context if tls else None)
    guard = KeyGuard(
        app, key, f"atoll-key-{port}", open_paths, is_secure=tls is not None, on_admitted=connections.admit
    )
    config = uvicorn.Config(
        guard,
        http=connections.protocol,  # type: ignore[arg-type]  # a factory, where uvicorn declares a class
        h11_max_incomplete_event_size=MAX_HEAD,
        log_level="warning",
        lifespan="on",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_END_SECONDS,
    )
    config.load()
    renewing = asyncio.create_task(tls.keep_new()) if tls else None
    listening(port)
    server = uvicorn.Server(config)

    def end() -> None:
        server.should_exit = True

    # If a signal cancelled this task, uvicorn would print the traceback of a server that did not close.
    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, end)
    await server.serve(sockets=[sock])
    if renewing:
        renewing.cancel()


class PageConnections:
    """The server's connections whose browser has not shown the key, bounded per address, in total and in time.

    uvicorn creates its connections with `protocol`. With a `context`, they use TLS.
    """

    def __init__(
        self, unauthenticated: UnauthenticatedConnections | None = None, context: ssl.SSLContext | None = None
    ) -> None:
        self._unauthenticated = unauthenticated or UnauthenticatedConnections(MAX_IN_ALL, MAX_PER_ADDRESS, SECONDS)
        self._context = context
        self._open: dict[Any, _Connection] = {}  # per address and port of the peer

    def protocol(self, *arguments: Any, **options: Any) -> asyncio.Protocol:
        """Create a connection with uvicorn's arguments."""
        make = partial(_Connection, self, *arguments, **options)
        return make() if self._context is None else TlsHandshake(self._context, make, self._unauthenticated)

    def admit(self, client: Any) -> None:
        """Keep this peer's connection: it has shown the key, or requests a public path."""
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
