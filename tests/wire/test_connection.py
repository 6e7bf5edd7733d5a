"""Framed connections: pure ones fed by hand, and real ones over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConnectError
from atoll.wire import connection as module
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect, listen
from atoll.wire.framing import MAX_FRAME


class Note(msgspec.Struct, frozen=True, array_like=True, tag=1):
    text: str


class Count(msgspec.Struct, frozen=True, array_like=True, tag=2):
    number: int


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


class FakeTransport:
    """Counts writes; `unread` stands for what the peer has not taken."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.unread = 0
        self.ended = ""

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))
        self.unread += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_extra_info(self, name: str) -> None:
        return None

    def abort(self) -> None:
        self.ended = self.ended or "abort"

    def close(self) -> None:
        self.ended = self.ended or "close"


class Peer:
    """A connection with a fake transport, and all that it reported."""

    def __init__(self, on_message: Callable[[Any], None] | None = None) -> None:
        self.messages: list[Any] = []
        self.lost: list[str] = []
        self.connection = Connection(
            Note | Count, on_message or self.messages.append, self.lost.append, name="the peer"
        )
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def feed(self, data: bytes) -> None:
        """As the event loop does: into the connection's own buffer, as much as fits at a time."""
        while data:
            buffer = self.connection.get_buffer(-1)
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            self.connection.buffer_updated(count)
            data = data[count:]


def on_a_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(bounded())


# ---- frames


@given(
    st.lists(st.one_of(st.builds(Note, st.text()), st.builds(Count, st.integers(0, 2**40))), max_size=10),
    st.lists(st.integers(1, 40), min_size=1, max_size=10),
)
def test_messages_arrive_whole_once_and_in_order_however_the_bytes_are_cut(messages, cuts):
    async def main() -> None:
        peer = Peer()
        data = b"".join(map(frame, messages))
        position = 0
        for i in range(len(data)):
            size = cuts[i % len(cuts)]
            peer.feed(data[position : position + size])
            position += size
            if position >= len(data):
                break
        assert peer.messages == messages
        assert peer.lost == []

    on_a_loop(main)


@pytest.mark.parametrize("size", [65_531, 65_532, 65_533, 200_000, 1_000_000])
def test_a_message_may_be_larger_than_the_reading_buffer(size):
    async def main() -> None:
        peer = Peer()
        messages = [Count(1), Note("x" * size), Count(2)]
        peer.feed(b"".join(map(frame, messages)))
        assert peer.messages == messages

    on_a_loop(main)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", MAX_FRAME + 1), "over the limit"),
        (b"\xff\xff\xff\xff", "over the limit"),
        (struct.pack("<I", 0), "sent invalid data"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "sent invalid data"),
        (frame([3, "unknown tag"]), "sent invalid data"),
        (frame([1, 17]), "sent invalid data"),
        (frame([1]), "sent invalid data"),
        (frame({"text": "no array"}), "sent invalid data"),
    ],
)
def test_a_peer_that_sends_what_is_no_message_is_cut_off(data, reason):
    async def main() -> None:
        peer = Peer()
        peer.feed(frame(Count(1)) + data + frame(Count(2)))
        assert peer.messages == [Count(1)]
        assert len(peer.lost) == 1
        assert reason in peer.lost[0]
        assert "the peer" in peer.lost[0]
        assert peer.transport.ended == "abort"

    on_a_loop(main)


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_the_end_of_the_connection(data):
    async def main() -> None:
        peer = Peer()
        peer.feed(data)
        assert len(peer.lost) <= 1

    on_a_loop(main)


# ---- sending


def test_messages_of_one_iteration_of_the_loop_leave_in_one_write():
    async def main() -> None:
        peer = Peer()
        for i in range(100):
            peer.connection.send(Count(i))
        assert peer.transport.writes == []
        await asyncio.sleep(0)
        assert peer.transport.writes == [b"".join(frame(Count(i)) for i in range(100))]
        peer.connection.send(Note("later"))
        await asyncio.sleep(0)
        assert peer.transport.writes[1:] == [frame(Note("later"))]

    on_a_loop(main)


def test_statistics_count_messages_and_bytes_both_ways():
    async def main() -> None:
        peer = Peer()
        peer.feed(frame(Count(1)) + frame(Note("a")))
        peer.connection.send(Count(1))
        assert peer.connection.statistics().unsent_bytes == len(frame(Count(1)))
        await asyncio.sleep(0)
        stats = peer.connection.statistics()
        assert (stats.messages_in, stats.messages_out) == (2, 1)
        assert stats.bytes_in == len(frame(Count(1)) + frame(Note("a")))
        assert stats.bytes_out == len(frame(Count(1)))

    on_a_loop(main)


def test_a_peer_that_never_reads_is_cut_off(monkeypatch):
    monkeypatch.setattr(module, "MAX_UNSENT", 1 << 20)

    async def main() -> None:
        peer = Peer()
        for _ in range(20):
            peer.connection.send(Note("x" * 100_000))
            await asyncio.sleep(0)
        assert len(peer.lost) == 1
        assert "does not read" in peer.lost[0]
        assert peer.transport.unread < 2 << 20, "nothing more is queued for it"

    on_a_loop(main)


# ---- ending


def test_the_end_is_reported_once_whatever_comes_first():
    async def main() -> None:
        peer = Peer()
        peer.connection.connection_lost(ConnectionResetError("reset by peer"))
        peer.connection.connection_lost(None)
        assert len(peer.lost) == 1
        assert "the peer closed the connection: reset by peer" in peer.lost[0]
        peer.connection.send(Count(1))
        await asyncio.sleep(0)
        assert peer.transport.writes == []
        assert peer.connection.is_closed

    on_a_loop(main)


def test_closing_is_not_reported_and_what_was_queued_still_leaves():
    async def main() -> None:
        peer = Peer()
        peer.connection.send(Count(1))
        peer.connection.close()
        peer.connection.close()
        peer.connection.send(Count(2))
        peer.connection.connection_lost(None)
        await asyncio.sleep(0)
        assert peer.transport.writes == [frame(Count(1))]
        assert peer.transport.ended == "close"
        assert peer.lost == []

    on_a_loop(main)


def test_a_handler_that_fails_ends_the_connection():
    def handler(message: Any) -> None:
        raise ValueError("cannot handle this")

    async def main() -> None:
        peer = Peer(handler)
        peer.feed(frame(Count(1)) * 3)
        assert len(peer.lost) == 1
        assert "cannot handle this" in peer.lost[0]

    on_a_loop(main)


def test_nothing_is_handled_after_the_handler_has_closed():
    async def main() -> None:
        messages: list[Any] = []

        def handler(message: Any) -> None:
            messages.append(message)
            peer.connection.close()

        peer = Peer(handler)
        peer.feed(frame(Count(1)) * 3)
        assert messages == [Count(1)]
        assert peer.lost == []

    on_a_loop(main)


# ---- sockets


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_two_processes_talk_over_a_socket(kind, short_directory: Path):
    async def main() -> None:
        served: list[Connection] = []
        received: asyncio.Queue[Any] = asyncio.Queue()
        lost: asyncio.Queue[str] = asyncio.Queue()

        def accept() -> Connection:
            served.append(Connection(Note | Count, received.put_nowait, lost.put_nowait))
            return served[-1]

        wanted = Address(path=str(short_directory / "s")) if kind == "unix" else Address(host="127.0.0.1", port=0)
        server, address = await listen(wanted, accept)
        assert kind == "unix" or address.port > 0
        answers: asyncio.Queue[Any] = asyncio.Queue()
        client = await connect(address, Note | Count, answers.put_nowait, lost.put_nowait, name="server")
        client.send(Note("x" * 300_000))
        client.send(Count(2))
        assert await received.get() == Note("x" * 300_000)
        assert await received.get() == Count(2)
        served[0].send(Count(3))
        assert await answers.get() == Count(3)
        client.close()
        assert "closed the connection" in await lost.get()
        server.close()

    on_a_loop(main)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_what_a_peer_has_sent_before_it_was_killed_arrives_though_an_answer_fails(loop, short_directory: Path):
    async def main() -> None:
        messages: list[Any] = []
        lost: asyncio.Queue[str] = asyncio.Queue()

        def answer(message: Any) -> None:
            messages.append(message)
            connection.send(Count(0))

        def accept() -> Connection:
            nonlocal connection
            connection = Connection(Note | Count, answer, lost.put_nowait)
            return connection

        connection: Connection
        server, address = await listen(Address(path=str(short_directory / "s")), accept)
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(address.path)
        peer.sendall(b"".join(frame(Note(f"{number:0900d}")) for number in range(150)))  # more than is read at once
        peer.close()
        await lost.get()
        assert [int(message.text) for message in messages] == list(range(150))
        server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))


class EndlessPeer:
    """Reads nothing, so an answer to it fails, and sends for as long as somebody takes it, up to a bound."""

    MAX = 32 << 20
    AHEAD = 16 << 10  # less than what a socket holds when it wakes who waits to send

    def __init__(self) -> None:
        self.sent = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._has_sent = threading.Condition()
        self._thread = threading.Thread(target=self._send)

    def begin(self, path: str) -> None:
        self._socket.connect(path)
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.start()

    def _send(self) -> None:
        content = frame(Note("x" * 4000))
        with contextlib.suppress(OSError):  # the other end has closed
            while self.sent < self.MAX:
                self._socket.sendall(content)
                with self._has_sent:
                    self.sent += len(content)
                    self._has_sent.notify()

    def wait_until_ahead(self, taken: int) -> None:
        """Until more lies in the socket than was taken."""
        with self._has_sent:
            self._has_sent.wait_for(lambda: self.sent - taken >= self.AHEAD or self.sent >= self.MAX, 10)

    def end(self) -> None:
        self._socket.close()
        self._thread.join()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_peer_that_does_not_read_and_sends_on_and_on_does_not_hold_up_the_loop(loop, short_directory: Path):
    async def main() -> None:
        connection: Connection
        lost: asyncio.Queue[str] = asyncio.Queue()
        peer = EndlessPeer()

        def answer(message: Any) -> None:
            peer.wait_until_ahead(connection.bytes_in)  # it is quicker than who reads
            connection.send(Count(0))

        def accept() -> Connection:
            nonlocal connection
            connection = Connection(Note | Count, answer, lost.put_nowait)
            return connection

        server, address = await listen(Address(path=str(short_directory / "s")), accept)
        await asyncio.to_thread(peer.begin, address.path)
        await lost.get()
        assert connection.bytes_in < peer.MAX / 4, "what came after the loss was waited for"
        await asyncio.to_thread(peer.end)
        server.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(main(), 60))


def test_connecting_where_no_process_listens_names_the_address(short_directory: Path):
    async def main() -> None:
        with pytest.raises(ConnectError, match=f"cannot reach the controller at unix:{short_directory}/none"):
            await connect(Address(path=f"{short_directory}/none"), Note, print, print, name="the controller")

    on_a_loop(main)


def test_of_several_addresses_the_first_that_answers_is_connected_to():
    async def main():
        server, where = await listen(Address(host="127.0.0.1"), lambda: Connection(Note, print, lambda reason: None))
        try:
            both = Address(host="127.0.0.2", port=where.port, others=(where,))
            connection = await connect(both, Note, print, lambda reason: None, name="a peer")
            assert (connection.peer_host, connection.peer_port) == ("127.0.0.1", where.port)
            connection.close()
        finally:
            server.close()
        with pytest.raises(ConnectError, match=f"nor at 127.0.0.2:{where.port}"):
            await connect(both, Note, print, lambda reason: None, name="a peer")

    asyncio.run(main())


def test_an_ended_connection_is_freed_without_the_garbage_collector() -> None:
    # Under a flood of connections, hundreds of ended ones would wait for it, each with its buffer.
    async def run() -> None:
        connection = in_cycles()
        connection.connection_made(FakeTransport())  # type: ignore[arg-type]
        ended = weakref.ref(connection)
        connection.connection_lost(None)
        assert len(connection.get_buffer(-1)) == 0
        gc.disable()
        try:
            del connection
            assert ended() is None
        finally:
            gc.enable()

    asyncio.run(run())


def in_cycles() -> Connection:
    """A connection whose callbacks refer to it."""

    def on_message(message: Any) -> None:
        connection.close()

    connection = Connection(Note | Count, on_message, lambda reason: on_message(reason), on_link=on_message)
    return connection
