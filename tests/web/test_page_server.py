"""Tests of a page's connections whose browser has not sent the key."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn

from atoll.web.page_key import KeyGuard
from atoll.web.page_server import MAX_HEAD, PageConnections
from atoll.web.tls import PageTls
from atoll.wire.unauthenticated import UnauthenticatedConnections
from tests.certificates import known_authority

KEY = "the key of this test"
SECONDS = 20.0
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Open = Callable[..., Coroutine[Any, Any, Ends]]  # with options of `asyncio.open_connection`


async def page(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"page"})


def play(
    scene: Callable[[Open], Coroutine[Any, Any, None]], context: ssl.SSLContext | None = None, **bounds: Any
) -> None:
    """With a server of a page behind the key. With a `context`, it uses TLS."""

    async def main() -> None:
        connections = PageConnections(UnauthenticatedConnections(**bounds), context)
        guard = KeyGuard(page, KEY, "a-key", frozenset(), on_admitted=connections.admit)
        config = uvicorn.Config(
            guard,
            http=connections.protocol,  # type: ignore[arg-type]
            h11_max_incomplete_event_size=MAX_HEAD,
            log_config=None,
            lifespan="off",
        )
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
            serving = asyncio.create_task(server._serve([sock]))
            await scene(lambda **options: asyncio.open_connection("127.0.0.1", port, **options))
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(main(), SECONDS))


async def ask(ends: Ends, **headers: str) -> bytes:
    reader, writer = ends
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"GET / HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
    return await reader.readline()


async def is_closed(ends: Ends) -> bool:
    try:
        while await ends[0].read(1000):
            pass
    except ConnectionError:
        pass
    ends[1].close()
    return True


def test_a_flood_of_connections_displaces_itself_and_no_browser_with_the_key() -> None:
    async def scene(open_: Open) -> None:
        browser = await open_()
        assert b"200" in await ask(browser, Authorization=f"Bearer {KEY}")
        flood = [await open_() for _ in range(10)]
        for each in flood[:6]:
            assert await is_closed(each)
        for _ in range(3):  # the headers and the body of the first answer, and the next one
            await browser[0].readline()
        other = await open_()
        assert b"200" in await ask(other, Authorization=f"Bearer {KEY}")
        for each in (browser, other, *flood[6:]):
            each[1].close()

    play(scene, limit=4, max_per_address=4, seconds=1000.0)


def test_a_request_that_comes_slowly_is_cut_off() -> None:
    async def scene(open_: Open) -> None:
        slow = await open_()
        slow[1].write(b"GET / HTTP/1.1\r\nX: ")
        assert await is_closed(slow)

    play(scene, seconds=0.2)


def test_a_large_head_is_refused() -> None:
    async def scene(open_: Open) -> None:
        ends = await open_()
        ends[1].write(b"GET / HTTP/1.1\r\nX: " + b"y" * (8 * MAX_HEAD))
        assert b"400" in await ends[0].readline()
        ends[1].close()

    play(scene)


def test_tls_handshakes_are_bounded_like_connections() -> None:
    authority = known_authority()
    tls = PageTls(lambda: authority.page_certificate(["127.0.0.1"]), authority.pem)
    trusting = ssl.create_default_context(cadata=authority.pem.decode())

    async def scene(open_: Open) -> None:
        browser = await open_(ssl=trusting)
        assert b"200" in await ask(browser, Authorization=f"Bearer {KEY}")
        flood = [await open_() for _ in range(10)]
        for each in flood[:6]:
            assert await is_closed(each)
        garbage = await open_()
        garbage[1].write(b"GET / HTTP/1.1\r\n\r\n")
        assert await is_closed(garbage)
        other = await open_(ssl=trusting)
        assert b"200" in await ask(other, Authorization=f"Bearer {KEY}")
        for each in (browser, other, *flood[6:]):
            each[1].close()

    play(scene, tls.context, limit=4, max_per_address=4, seconds=1000.0)


def test_a_tls_handshake_that_comes_slowly_is_cut_off() -> None:
    authority = known_authority()
    tls = PageTls(lambda: authority.page_certificate(["127.0.0.1"]), authority.pem)

    async def scene(open_: Open) -> None:
        assert await is_closed(await open_())

    play(scene, tls.context, seconds=0.2)
