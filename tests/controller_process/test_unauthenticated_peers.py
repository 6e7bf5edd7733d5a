"""Tests of the resources that a controller's port uses for peers that are not authenticated."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.controller_process.controller_options import ControllerOptions
from atoll.controller_process.process_state import ProcessState
from atoll.controller_process.shell import ControllerShell, new_controller
from atoll.protocol import messages as m
from atoll.security.certificate_authority import CertificateAuthority
from atoll.security.enrollment import AskAuthority, Enroll
from atoll.security.roles import Role
from atoll.security.start_security import authority_file
from atoll.security.tokens import BURST, TOO_MANY
from atoll.wire.address import Address
from atoll.wire.endpoints import listen
from atoll.wire.framing import MAX_FIRST_FRAME, encode, frame_header
from atoll.wire.resumption.link_messages import Resume, encode_link
from atoll.wire.unauthenticated import UnauthenticatedConnections
from tests.controller.play import chain_of

SECONDS = 20.0
TOKEN = "the clients' token"
HUGE = frame_header(63 << 20)
HELLO = m.Hello(m.PROTOCOL, "operator", TOKEN, 1, "test", "a test")


class Port:
    """Controller that listens at a TCP port of this process, with or without TLS."""

    def __init__(self, address: Address, unauthenticated: UnauthenticatedConnections) -> None:
        self.address = address
        self.unauthenticated = unauthenticated

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = None
        if self.address.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return await asyncio.open_connection(self.address.host, self.address.port, ssl=context)

    async def ask(self, message: Any) -> Any:
        """Return the reply to a first message as a list, or None if the connection is closed without a reply."""
        reader, writer = await self.open()
        writer.write(encode(message))
        answer = await read_message(reader)
        writer.close()
        return answer


async def read_message(reader: asyncio.StreamReader) -> Any:
    try:
        while True:
            header = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), SECONDS), "little")
            content = await reader.readexactly(header & 0xFFFFFFF)
            if not header >> 29:  # other messages are about the connection itself
                return msgspec.msgpack.decode(content)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def is_closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(1), SECONDS) == b""
    return True


@contextlib.asynccontextmanager
async def port(directory: Path, *, tls: bool, **bounds: Any) -> AsyncIterator[Port]:
    unauthenticated = UnauthenticatedConnections(**bounds)
    options = ControllerOptions("", ClusterSettings("1x1x1"), os.getpid(), directory=str(directory))
    if tls:
        CertificateAuthority.make("a test's").save(authority_file(directory))
    state = ProcessState(new_controller(options, TOKEN))
    shell = ControllerShell(options, state, asyncio.Event(), has_tls=tls, unauthenticated=unauthenticated)
    shell.start()
    own = shell.joiners.identity if shell.joiners is not None else None
    server, address = await listen(Address(host="127.0.0.1", tls=tls), shell.accept, own, unauthenticated)
    yield Port(address, unauthenticated)
    server.close()
    shell.stop()


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 3 * SECONDS))


@pytest.mark.parametrize("tls", [False, True])
def test_a_large_frame_is_refused_by_its_header_before_the_peer_is_authenticated(tmp_path: Path, tls: bool) -> None:
    async def scene() -> None:
        async with port(tmp_path, tls=tls) as opened:
            for header in (HUGE, frame_header(MAX_FIRST_FRAME + 1)):
                reader, writer = await opened.open()
                writer.write(header)
                assert await is_closed(reader)
                writer.close()
            assert opened.unauthenticated.statistics().open == 0

    play(scene)


def test_a_message_in_pieces_is_no_way_around_that(tmp_path: Path) -> None:
    async def scene() -> None:
        async with port(tmp_path, tls=False) as opened:
            reader, writer = await opened.open()
            writer.write((frame_header(1 << 31 | 10_000) + bytes(10_000)) * 2)
            assert await is_closed(reader)
            writer.close()

    play(scene)


def test_the_message_that_follows_an_accepted_hello_may_be_large(tmp_path: Path) -> None:
    async def scene() -> None:
        async with port(tmp_path, tls=False) as opened:
            reader, writer = await opened.open()
            large = m.RemoveTenant("x" * (4 * MAX_FIRST_FRAME))
            writer.write(encode(HELLO) + encode(large))
            assert await read_message(reader) is not None
            assert opened.unauthenticated.statistics().open == 0
            writer.close()

    play(scene)


def test_messages_that_clients_do_not_send_are_small(tmp_path: Path) -> None:
    # A worker's message with 60,000 devices took 13 s until it was refused, and stalled all sessions.
    devices = tuple(m.DeviceInfo(i, "x", "x", ("device",), "device", (i, 0, 0), 0, i, 0) for i in range(1000))
    ready = encode(m.WorkerReady(0, 0, devices, "cpu", "1", "", 1))
    assert MAX_FIRST_FRAME < len(ready) < 3 * MAX_FIRST_FRAME

    async def scene() -> None:
        async with port(tmp_path, tls=False) as opened:
            reader, writer = await opened.open()
            writer.write(encode(HELLO) + ready[:16])
            assert await is_closed(reader)
            writer.close()

    play(scene)


@pytest.mark.parametrize("role", ["proxy", "operator"])
def test_a_client_may_not_send_more_than_its_messages_need(tmp_path: Path, role: str) -> None:
    # Decoding 60 MiB of nodes took seconds, in which no other session was served.
    program = encode(m.ProgramPart(1, chain_of(2)))[4:]

    async def scene() -> None:
        async with port(tmp_path, tls=False) as opened:
            for header, begin in ((HUGE, program), (frame_header(1 << 20), program), (HUGE, b"\x92\x2e")):
                reader, writer = await opened.open()
                writer.write(encode(msgspec.structs.replace(HELLO, role=role)) + header + begin + bytes(8))
                assert await is_closed(reader)
                writer.close()

    play(scene)


@pytest.mark.parametrize("tls", [False, True])
def test_a_flood_of_silent_connections_displaces_itself_and_lets_others_in(tmp_path: Path, tls: bool) -> None:
    async def scene() -> None:
        async with port(tmp_path, tls=tls, limit=8, max_per_address=4) as opened:
            silent = [await asyncio.open_connection("127.0.0.1", opened.address.port) for _ in range(12)]
            assert all([await is_closed(reader) for reader, _ in silent[:8]])
            assert opened.unauthenticated.statistics().open == 4
            assert await opened.ask(AskAuthority() if tls else msgspec.structs.replace(HELLO, token="")) is not None
            for _, writer in silent:
                writer.close()

    play(scene)


@pytest.mark.parametrize("tls", [False, True])
def test_peers_that_do_not_authenticate_in_time_are_closed(tmp_path: Path, tls: bool) -> None:
    async def scene() -> None:
        async with port(tmp_path, tls=tls, seconds=0.2) as opened:
            reader, writer = await opened.open()
            writer.write(encode(HELLO)[:7])
            assert await is_closed(reader)
            assert opened.unauthenticated.statistics().expired == 1
            writer.close()

    play(scene)


def test_an_admitted_peer_counts_in_no_bound(tmp_path: Path) -> None:
    async def scene() -> None:
        async with port(tmp_path, tls=False, limit=2, max_per_address=2) as opened:
            reader, writer = await opened.open()
            writer.write(encode(HELLO) + encode(m.StatusRequest()))
            assert await read_message(reader) is not None
            strangers = [await opened.open() for _ in range(8)]
            assert all([await is_closed(each) for each, _ in strangers[:6]])
            writer.write(encode(m.StatusRequest()))
            assert await read_message(reader) is not None
            for each in (writer, *(each for _, each in strangers)):
                each.close()

    play(scene)


@pytest.mark.parametrize("tls", [False, True])
def test_a_stranger_cannot_resume_a_connection_and_is_refused_at_once(tmp_path: Path, tls: bool) -> None:
    async def scene() -> None:
        async with port(tmp_path, tls=tls) as opened:
            reader, writer = await opened.open()
            writer.write(encode_link(Resume(1, "0" * 64, 1, 0, 0, 1)))
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), SECONDS)
            writer.close()
            statistics = opened.unauthenticated.statistics()
            assert (statistics.open, statistics.expired, statistics.refused) == (0, 0, 1)

    play(scene)


def test_tokens_are_not_looked_at_after_many_wrong_ones_from_an_address(tmp_path: Path) -> None:
    async def scene() -> None:
        async with port(tmp_path, tls=False) as opened:
            for count in range(BURST):
                refused = await opened.ask(msgspec.structs.replace(HELLO, token=f"guess {count}"))
                assert "asks for a token" in str(refused)
            while TOO_MANY not in str(await opened.ask(msgspec.structs.replace(HELLO, token="another guess"))):
                pass

    play(scene)


def test_join_tokens_are_not_looked_at_after_many_wrong_ones(tmp_path: Path) -> None:
    async def scene() -> None:
        async with port(tmp_path, tls=True) as opened:
            for count in range(BURST):
                refused = await opened.ask(Enroll(Role.CLIENT, "x", f"guess {count}", b""))
                assert "its token is not the cluster's" in str(refused)
            while TOO_MANY not in str(await opened.ask(Enroll(Role.CLIENT, "x", "another guess", b""))):
                pass

    play(scene)


@pytest.mark.parametrize("tls", [False, True])
def test_refusals_are_logged_once_with_their_address(
    tmp_path: Path, tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with port(tmp_path, tls=tls) as opened:
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", opened.address.port)
                if tls:
                    writer.write(encode(HELLO))  # a client with --insecure
                else:
                    writer.write(b"\x16\x03\x01\x02\x00\x01\x00")  # a client without it
                assert await reader.read() is not None
                writer.close()

    play(scene)
    lines = [each for each in caplog.messages if "was refused" in each]
    assert len(lines) == 1
    assert "a connection from 127.0.0.1 was refused" in lines[0]
    assert "TLS" in lines[0]
