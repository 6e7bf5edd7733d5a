"""The server of the page: NiceGUI on uvicorn, behind the key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI, Request, Response
from nicegui import ui

from atoll.web.listening import listening_socket
from atoll.web.metrics_server import metrics_answer
from atoll.web.page_connections import MAX_HEAD, PageConnections
from atoll.web.page_key import METRICS, KeyGuard
from atoll.web.pages import Pages
from atoll.web.poller import Poller
from atoll.web.tls import PageTls
from atoll.wire.address import Address

_END_SECONDS = 3  # for browsers to be told


async def serve_page(
    poller: Poller, address: Address, key: str, listening: Callable[[int], None], tls: PageTls | None = None
) -> None:
    """Serves until it is told to end (SIGINT, SIGTERM); calls `listening(port)` first. Once a process.

    Raises AddressError where it cannot listen.
    """
    sock = listening_socket(address)
    port = sock.getsockname()[1]
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    async def metrics(request: Request) -> Response:
        status, content_type, body = await metrics_answer(poller, request.headers.get("accept", ""))
        return Response(body, int(status.split()[0]), {"content-type": content_type})

    app.add_api_route(METRICS, metrics, methods=["GET"])
    Pages(poller).register()
    ui.run_with(
        app,
        title=f"Atoll: {poller.source.name}",
        dark=None,
        tailwind=False,
        show_welcome_message=False,
        binding_refresh_interval=None,
    )
    open_paths = frozenset({METRICS}) if address.is_local else frozenset[str]()
    connections = PageConnections()
    guard = KeyGuard(
        app, key, f"atoll-key-{port}", open_paths, is_secure=tls is not None, on_admitted=connections.admit
    )
    config = uvicorn.Config(
        guard,
        http=connections.protocol,  # type: ignore[arg-type]  # it makes what uvicorn's own class would
        h11_max_incomplete_event_size=MAX_HEAD,
        log_level="warning",
        lifespan="on",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_END_SECONDS,
    )
    config.load()
    config.ssl = tls.context if tls else None
    renewing = asyncio.create_task(tls.keep_new()) if tls else None
    listening(port)
    await uvicorn.Server(config).serve(sockets=[sock])
    if renewing:
        renewing.cancel()
