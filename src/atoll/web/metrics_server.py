"""An HTTP server that serves only `/metrics`, for scrapers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from atoll.errors import AddressError
from atoll.telemetry.metrics import exposition
from atoll.web.page_key import METRICS, has_key
from atoll.web.poller import Poller
from atoll.web.tls import PageTls
from atoll.web.tls_handshake import TlsHandshake
from atoll.wire.address import Address
from atoll.wire.sockets import bind, cannot_listen, peer_of
from atoll.wire.unauthenticated import UnauthenticatedConnections

_REQUEST_SECONDS = 10.0
_MAX_BYTES = 16 * 1024  # per request
# Bounds of open connections. Each connection closes after its answer.
MAX_PER_ADDRESS = 64
MAX_IN_ALL = 128


async def serve_metrics(
    poller: Poller, address: Address, key: str, listening: Callable[[int], None], tls: PageTls | None = None
) -> None:
    """Serve until canceled. Calls `listening(port)` first. A `key` of "" makes the metrics public.

    Raises AddressError if it cannot listen.
    """

    open_ = UnauthenticatedConnections(MAX_IN_ALL, MAX_PER_ADDRESS, _REQUEST_SECONDS)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Scrape(writer)
        open_.add(connection, peer_of(writer.get_extra_info("socket")))
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                status, content_type, body = await _answer(poller, head.decode("latin-1"), key)
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                    + (b"" if head.startswith(b"HEAD ") else body)
                )
                await writer.drain()
        open_.remove(connection)
        writer.close()

    def stream() -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(_MAX_BYTES), serve)

    def accepted() -> asyncio.Protocol:
        return TlsHandshake(tls.context, stream, open_) if tls else stream()

    sock = listening_socket(address)
    server = await asyncio.get_running_loop().create_server(accepted, sock=sock)
    listening(sock.getsockname()[1])
    async with server, asyncio.TaskGroup() as tasks:
        if tls:
            tasks.create_task(tls.keep_new())
        tasks.create_task(server.serve_forever())


class _Scrape:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def drop(self, reason: str) -> None:
        self._writer.transport.abort()


async def _answer(poller: Poller, head: str, key: str) -> tuple[str, str, bytes]:
    text = "text/plain; charset=utf-8"
    request, *lines = head.split("\r\n")
    method, _, rest = request.partition(" ")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if key and not has_key(key, headers.get("authorization", "")):
        return "401 Unauthorized", text, b"send the key as a bearer token\n"
    if method not in ("GET", "HEAD"):
        return "405 Method Not Allowed", text, b"only GET is supported\n"
    if rest.split(" ")[0].split("?")[0] != METRICS:
        return "404 Not Found", text, f"the metrics are at {METRICS}\n".encode()
    return await metrics_answer(poller, headers.get("accept", ""))


async def metrics_answer(poller: Poller, accept: str) -> tuple[str, str, bytes]:
    """Return the status, content type and body for a scraper; the status is 503 while the cluster does not answer."""
    await poller.refresh()
    if poller.watch.problem:
        return "503 Service Unavailable", "text/plain; charset=utf-8", f"{poller.watch.problem}\n".encode()
    body, content_type = exposition(poller.watch.snapshot, accept)
    return "200 OK", content_type, body


def listening_socket(address: Address) -> socket.socket:
    """Return a socket that listens at HOST:PORT; port 0 means any free port. Raises AddressError."""
    if address.is_unix or address.others:
        raise AddressError(f"{address}: expected one HOST:PORT to serve at")
    try:
        return bind(address)
    except OSError as error:
        raise cannot_listen(address, error) from None
