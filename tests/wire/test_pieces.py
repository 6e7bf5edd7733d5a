"""Tests of large messages in pieces: which messages overtake them, and how many of their bytes are in transit."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest
import uvloop

from atoll.security.roles import Role
from atoll.wire import connection as module
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect, listen
from atoll.wire.framing import PIECE_BYTES, FrameDecoder, encode
from tests.certificates import identity
from tests.wire.test_connection import Count, Note, Peer

LARGE = 48 << 20
Main = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def on_a_loop(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    def run(main: Main) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await main()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(bounded())

    return run


class Reader:
    """The other end of a connection, which reads on request and counts bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = FrameDecoder(Note | Count)
        self.came: list[tuple[int, Any]] = []  # messages, and how many bytes had come by then
        self.nbytes = 0

    async def read_until(self, condition: Callable[[], Any]) -> None:
        loop = asyncio.get_running_loop()
        while not condition():
            data = await loop.sock_recv(self._sock, 1 << 16)
            assert data, "the connection has ended"
            self.nbytes += len(data)
            self.came.extend((self.nbytes, message) for message in self._decoder.feed(memoryview(bytearray(data))))


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, Reader]]:
    """A connection over TCP, whose peer reads on command, from a small buffer."""
    made: list[Connection] = []
    server, address = await listen(
        Address(host="127.0.0.1"), lambda: Connection(Note, print, print, on_made=made.append)
    )
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
        while not made:
            await asyncio.sleep(0.001)
        yield made[0], Reader(sock)
        made[0].close()
    server.close()


async def until_it_is_full(connection: Connection) -> None:
    """Until no more of what is sent leaves."""
    before = -1
    while connection.statistics().bytes_out != before:
        before = connection.statistics().bytes_out
        await asyncio.sleep(0.05)


def test_a_small_message_overtakes_48_mib_on_a_link_that_is_full(on_a_loop: Callable[[Main], None]):
    async def main() -> None:
        async with connected() as (connection, reader):
            large = Note("x" * LARGE)
            connection.send(Count(1))
            connection.send_in_pieces(encode(large))
            await until_it_is_full(connection)
            connection.send(Count(2))
            await reader.read_until(lambda: len(reader.came) == 2)
            assert [message for _, message in reader.came] == [Count(1), Count(2)]
            ahead, _ = reader.came[1]
            # In the sockets' buffers. A message in one frame would all be ahead.
            assert ahead < 4 << 20
            connection.send(Count(3))
            await reader.read_until(lambda: len(reader.came) == 4)
            assert [message for _, message in reader.came[2:]] == [Count(3), large]

    on_a_loop(main)


def test_what_is_handed_to_the_transport_is_little(on_a_loop: Callable[[Main], None]):
    async def main() -> None:
        async with connected() as (connection, _):
            connection.send_in_pieces(encode(Note("x" * LARGE)))
            await until_it_is_full(connection)
            assert connection._transport is not None
            assert connection._transport.get_write_buffer_size() <= 3 * PIECE_BYTES
            assert connection.statistics().unsent_bytes > LARGE - (4 << 20)

    on_a_loop(main)


def test_a_small_message_overtakes_a_large_one_over_tls(on_a_loop: Callable[[Main], None]):
    async def main() -> None:
        made: list[Connection] = []
        came: asyncio.Queue[Any] = asyncio.Queue()
        server, address = await listen(
            Address(host="127.0.0.1", tls=True),
            lambda: Connection(Note, print, print, on_made=made.append),
            identity(Role.CONTROLLER),
        )
        client = await connect(address, Note | Count, came.put_nowait, print, name="it", identity=identity(Role.HOST))
        while not made:
            await asyncio.sleep(0.001)
        large = Note("x" * LARGE)
        made[0].send_in_pieces(encode(large))
        await asyncio.sleep(0)
        made[0].send(Count(1))
        most = 0
        while came.qsize() < 2:
            assert made[0]._transport is not None
            most = max(most, made[0]._transport.get_write_buffer_size())
            await asyncio.sleep(0)
        assert [await came.get(), await came.get()] == [Count(1), large]
        assert most <= 3 * PIECE_BYTES
        client.close()
        made[0].close()
        server.close()

    on_a_loop(main)


# ---- one turn of the loop at a time


def alone(main: Main) -> None:
    asyncio.run(main())


def test_a_large_message_arrives_after_what_was_sent_before_it_and_they_in_order():
    async def main() -> None:
        peer = Peer()
        large = [Note(letter * 3 * PIECE_BYTES) for letter in "ab"]
        for number, message in enumerate(large):
            peer.connection.send(Count(number))
            peer.connection.send_in_pieces(encode(message))
        for _ in range(20):
            await asyncio.sleep(0)
        other = Peer()
        other.feed(b"".join(peer.transport.writes))
        assert other.messages == [Count(0), Count(1), *large]

    alone(main)


def test_a_small_message_does_not_overtake_a_large_one_where_both_are_sent_in_pieces():
    async def main() -> None:
        peer = Peer()
        messages = [Note("a" * 3 * PIECE_BYTES), Note("b"), Note("c" * 2 * PIECE_BYTES)]
        for message in messages:
            peer.connection.send_in_pieces(encode(message))
        for _ in range(20):
            await asyncio.sleep(0)
        other = Peer()
        other.feed(b"".join(peer.transport.writes))
        assert other.messages == messages

    alone(main)


def test_while_the_transport_is_full_no_piece_is_written_and_small_messages_are():
    async def main() -> None:
        peer = Peer()
        peer.connection.send_in_pieces(encode(Note("x" * 100 * PIECE_BYTES)))
        await asyncio.sleep(0)
        peer.connection.pause_writing()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(peer.transport.writes) == 1
        peer.connection.send(Count(1))
        await asyncio.sleep(0)
        assert peer.transport.writes[1:] == [encode(Count(1))]
        peer.connection.resume_writing()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(peer.transport.writes) > 4

    alone(main)


def test_a_peer_that_never_reads_is_cut_off_also_where_all_is_in_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_UNSENT", 1 << 20)

    async def main() -> None:
        peer = Peer()
        peer.connection.pause_writing()
        for _ in range(20):
            peer.connection.send_in_pieces(encode(Note("x" * 100_000)))
            await asyncio.sleep(0)
        assert len(peer.lost) == 1
        assert "does not read" in peer.lost[0]
        assert peer.connection.statistics().unsent_bytes == 0

    alone(main)


def test_a_connection_that_closes_does_not_send_the_rest_of_what_is_in_pieces():
    async def main() -> None:
        peer = Peer()
        peer.connection.send_in_pieces(encode(Note("x" * 100 * PIECE_BYTES)))
        await asyncio.sleep(0)
        peer.connection.send(Count(1))
        peer.connection.close()
        assert peer.transport.writes[1:] == [encode(Count(1))]
        assert msgspec.msgpack.decode(peer.transport.writes[1][4:], type=Count) == Count(1)

    alone(main)
