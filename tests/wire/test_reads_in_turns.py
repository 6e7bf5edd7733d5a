"""A peer that sends much at once does not keep the loop from others: an accepted connection reads little in a turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from atoll.security.roles import Role
from atoll.wire.address import Address
from atoll.wire.connection import ACCEPTED_READ_SIZE, Connection
from atoll.wire.endpoints import connect, listen
from atoll.wire.framing import encode
from atoll.wire.unauthenticated import UnauthenticatedConnections
from tests.certificates import identity

COUNT = 400


class Note(msgspec.Struct, frozen=True, array_like=True, tag=1):
    number: int
    text: str = "x" * 900


class Server:
    """Accepts one connection, and notes in which turn of the loop each message arrives."""

    def __init__(self, answers: bool = False) -> None:
        self.came: list[int] = []
        self.turns: dict[int, int] = {}  # by turn, the bytes of the messages that came in it
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self._answers = answers
        self._turn = 0
        self._unauthenticated = UnauthenticatedConnections()
        self._loop = asyncio.get_running_loop()
        self._count()

    def _count(self) -> None:
        self._turn += 1
        self._next = self._loop.call_soon(self._count)

    async def listen(self, address: Address) -> Address:
        own = identity(Role.CONTROLLER) if address.tls else None
        self._server, address = await listen(address, self._accept, own, self._unauthenticated)
        return address

    def _accept(self) -> Connection:
        def on_message(message: Any) -> None:
            self.came.append(message.number)
            self.turns[self._turn] = self.turns.get(self._turn, 0) + len(encode(message))
            if not message.number:
                connection.authenticated()
            if self._answers:
                connection.send(message)

        connection = Connection(Note, on_message, self.lost.put_nowait, unauthenticated=self._unauthenticated)
        return connection

    def close(self) -> None:
        self._next.cancel()
        self._server.close()

    def check(self) -> None:
        assert self.came == list(range(COUNT))
        assert max(self.turns.values()) < ACCEPTED_READ_SIZE + 1000


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_many_messages_at_once_are_read_over_many_turns(loop: Callable[[], Any], tls: bool) -> None:
    async def main() -> None:
        server = Server()
        address = await server.listen(Address(host="127.0.0.1", tls=tls))
        client = await connect(
            address, Note, print, print, name="a server", identity=identity(Role.CLIENT) if tls else None
        )
        for number in range(COUNT):
            client.send(Note(number))
        client.close()
        await server.lost.get()
        server.close()
        server.check()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_all_arrives_though_the_peer_has_ended_and_answers_fail(loop: Callable[[], Any], short_directory: Path) -> None:
    async def main() -> None:
        server = Server(answers=True)
        address = await server.listen(Address(path=str(short_directory / "s")))
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(address.path)
            peer.sendall(b"".join(encode(Note(number)) for number in range(150)))
        await server.lost.get()
        server.close()
        assert server.came == list(range(150))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_large_message_arrives_over_many_turns(loop: Callable[[], Any], tls: bool) -> None:
    async def main() -> None:
        server = Server(answers=True)
        address = await server.listen(Address(host="127.0.0.1", tls=tls))
        answers: asyncio.Queue[Any] = asyncio.Queue()
        own = identity(Role.CLIENT) if tls else None
        client = await connect(address, Note, answers.put_nowait, print, name="a server", identity=own)
        messages = [Note(0), Note(1, "y" * 3_000_000), Note(2)]
        for message in messages:
            client.send(message)
        assert [await answers.get() for _ in messages] == messages
        client.close()
        await server.lost.get()
        server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))
