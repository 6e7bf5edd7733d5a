"""Tests of random and mutated input: it causes no exception, stays within the limits, and does not affect other
clients.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import hpack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.grpc import Call, GrpcServer, Limits
from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import PREFACE, ConnectionFailure, ErrorCode, HeaderList
from atoll.grpc.http2.headers import HeaderBlocks
from atoll.grpc.http2.http2_connection import Http2Connection
from atoll.grpc.http2.http2_stream import Http2Stream
from tests.grpc.http2.http2_peer import REQUEST, Peer, frame, message, request, served
from tests.grpc.serving import Serving, echo
from tests.thoroughness import examples

LIMITS = Limits(
    stream_window_bytes=1 << 16,
    connection_window_bytes=1 << 18,
    max_concurrent_streams=8,
    max_header_bytes=1 << 12,
    incomplete_bytes=1 << 20,
)


class _Transport(asyncio.Transport):
    """Transport that accepts all bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written += data

    def pause_reading(self) -> None:
        raise AssertionError("everything that is written is taken")

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class _Echo:
    """Consumer that echoes every byte."""

    def __init__(self, stream: Http2Stream) -> None:
        self._stream = stream

    def data(self, view: memoryview, start: int, stop: int) -> None:
        self._stream.write([bytes(view[start:stop])], stop - start)

    def reserve(self, limit: int) -> memoryview | None:
        return None

    def filled(self, count: int) -> None:
        raise AssertionError("nothing was reserved")

    def half_closed(self) -> None:
        self._stream.end([(b"x", b"y")])


_frames = st.builds(
    frame,
    st.one_of(st.integers(0, 9), st.integers(0, 255)),
    st.one_of(st.sampled_from([0, 1, 4, 5, 8, 0x2D]), st.integers(0, 255)),
    st.one_of(st.sampled_from([0, 1, 3, 5]), st.integers(0, 2**32 - 1)),
    st.one_of(st.binary(max_size=40), st.just(b"\x83\x86\x84"), st.just(bytes(4)), st.just(b"\0\0\0\1")),
)


_input = st.lists(st.one_of(_frames, st.binary(max_size=30)), max_size=20)


def replies(written: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Return the frames in a server's output as (type, stream, payload). The output must consist of whole frames."""
    position = 0
    while position < len(written):
        head, _, number = frames.frame_header.unpack_from(written, position)
        end = position + frames.HEADER_BYTES + (head >> 8)
        assert end <= len(written)
        yield head & 0xFF, number, bytes(written[position + frames.HEADER_BYTES : end])
        position = end


async def feed(connection: Http2Connection, data: bytes, cut: int) -> None:
    """Feed the connection until it ends, and check its state."""
    transport = _Transport()
    connection.connection_made(transport)
    for start in range(0, len(data), cut):
        if transport.closed:
            break
        chunk = data[start : start + cut]
        while chunk:
            buffer = connection.get_buffer(-1)
            count = min(len(chunk), len(buffer))
            assert count, "nowhere to read to"
            buffer[:count] = chunk[:count]
            connection.buffer_updated(count)
            chunk = chunk[count:]
    for _ in range(3):
        await asyncio.sleep(0)
    assert connection.queued_bytes() <= LIMITS.max_concurrent_streams * LIMITS.stream_window_bytes + 2 * len(data)
    sent = list(replies(transport.written))
    goaways = [payload for kind, _, payload in sent if kind == frames.GOAWAY]
    assert len(goaways) == transport.closed
    if goaways:
        assert sent[-1][0] == frames.GOAWAY
        assert int.from_bytes(goaways[0][4:8], "big") not in (ErrorCode.NO_ERROR, ErrorCode.INTERNAL_ERROR)
    for kind, _, payload in sent:
        if kind == frames.RST_STREAM:
            assert int.from_bytes(payload, "big") != ErrorCode.INTERNAL_ERROR
    connection.connection_lost(None)
    assert not connection.streams


@given(pieces=_input, cut=st.integers(1, 50), preface=st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_no_input_raises_out_of_the_protocol(pieces: list[bytes], cut: int, preface: bool) -> None:
    def request(stream: Http2Stream, headers: HeaderList) -> None:
        stream.consumer = _Echo(stream)

    async def run() -> None:
        lost: list[Http2Connection] = []
        connection = Http2Connection(request, lambda made: None, lost.append, LIMITS)
        data = b"".join(pieces)
        if preface:
            data = PREFACE + frames.settings_frame(()) + data
        await feed(connection, data, cut)
        assert lost == [connection]

    asyncio.run(run())


def conversation() -> list[bytes]:
    """Return a valid conversation of six calls, as frames. Header blocks depend on the previous ones."""
    encoder = hpack.Encoder()
    ends = frames.END_HEADERS | frames.END_STREAM

    def headers(stream: int, list_: list[tuple[str, str]] = REQUEST, flags: int = frames.END_HEADERS) -> bytes:
        return frame(frames.HEADERS, flags, stream, encoder.encode(list_))

    first = headers(1)
    block = encoder.encode(request("/test.Test/Pause", ("text", "x" * 300), ("raw-bin", "AAEC")))
    return [
        PREFACE + frames.settings_frame([(4, 1 << 20), (5, 1 << 20), (0xFE03, 1)]),
        frames.window_update(0, 1 << 20),
        first,
        frame(frames.DATA, 0, 1, message(b"first") + message(b"") + message(bytes(300))),
        frame(frames.HEADERS, frames.PRIORITY_FLAG, 3, bytes(5) + block[:20]),
        frame(frames.CONTINUATION, 0, 3, block[20:200]),
        frame(frames.CONTINUATION, frames.END_HEADERS, 3, block[200:]),
        frame(frames.DATA, 0, 3, message(b"held") * 20),
        frames.SETTINGS_ACK,
        frame(frames.PING, 0, 0, b"12345678"),
        frame(frames.DATA, frames.PADDED, 1, b"\x05" + message(b"padded") + bytes(5)),
        headers(5),
        frame(frames.DATA, 0, 5, message(bytes(70_000))[:30_000]),
        frame(frames.DATA, 0, 5, message(bytes(70_000))[30_000:60_000]),
        frames.window_update(5, 1000),
        frames.rst_stream(3, ErrorCode.CANCEL),
        frame(frames.DATA, frames.END_STREAM, 5, message(bytes(70_000))[60_000:]),
        headers(7, request("/test.Test/None")),
        frame(frames.DATA, frames.END_STREAM, 1),
        headers(9, flags=ends),
        headers(11),
        headers(11, [("x", "y")], ends),
        frame(frames.PRIORITY, 0, 13, b"\0\0\0\1\1"),
        frames.goaway(0, ErrorCode.NO_ERROR, b"bye"),
    ]


def mutate(pieces: list[bytes], source: random.Random) -> bytes:
    """Return the frames with some omitted, repeated, exchanged or truncated, and some bytes replaced."""
    pieces = list(pieces)
    for _ in range(source.randint(0, 3)):
        here, there = source.randrange(1, len(pieces)), source.randrange(1, len(pieces))
        match source.randrange(4):
            case 0:
                del pieces[here]
            case 1:
                pieces.insert(there, pieces[here])
            case 2:
                pieces[here], pieces[there] = pieces[there], pieces[here]
            case 3:
                pieces[here] = pieces[here][: source.randrange(len(pieces[here]) + 1)]
    data = bytearray(b"".join(pieces))
    small = [index for index in range(len(data)) if data[index]] or [0]  # most zeros are part of contents
    for _ in range(source.randint(0, 4)):
        index = min(len(data) - 1, source.choice(small) + source.randrange(4))
        data[index] = source.choice([0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)])
    return bytes(data)


@given(seed=st.integers(0, 2**64), cut=st.sampled_from([1 << 18, 5000, 700, 33]))
@settings(max_examples=examples(100), deadline=None)
def test_a_mutated_conversation_ends_every_call_once_and_costs_no_more_than_the_limits(seed: int, cut: int) -> None:
    opened: list[Call] = []
    ended: list[Call] = []

    def handler(call: Call) -> None:
        opened.append(call)
        if call.path.endswith("Pause"):
            call.pause()
        call.set_handlers(
            lambda content: call.send(bytes(content)),
            lambda: (ended.append(call), call.finish())[1],
            lambda: ended.append(call),
        )

    async def run() -> None:
        server = GrpcServer({"/test.Test/Echo": handler, "/test.Test/Pause": handler}, limits=LIMITS)
        await feed(server._connection(), mutate(conversation(), random.Random(seed)), cut)
        now = server.statistics()
        assert (now.connections, now.calls_open, now.queued_bytes, now.incomplete_bytes) == (0, 0, 0, 0)
        assert all(call.ended for call in opened)
        assert sorted(map(id, ended)) == sorted(map(id, opened))

    asyncio.run(run())


def test_the_conversation_that_is_mutated_is_valid() -> None:
    async def run() -> None:
        server = GrpcServer({"/test.Test/Echo": echo, "/test.Test/Pause": lambda call: call.pause()}, limits=LIMITS)
        connection = server._connection()
        await feed(connection, b"".join(conversation()), 1 << 18)
        now = server.statistics()
        assert (now.calls, now.messages_in) == (6, 5)

    asyncio.run(run())


@given(blocks=st.lists(st.tuples(st.binary(max_size=200), st.integers(1, 64)), max_size=5))
@settings(max_examples=examples(100), deadline=None)
def test_a_random_header_block_decodes_or_ends_the_connection(blocks: list[tuple[bytes, int]]) -> None:
    decoder = HeaderBlocks(LIMITS)
    for block, cut in blocks:
        try:
            headers = decoder.begin(0, 1, b"")
            for start in range(0, len(block), cut):
                headers = decoder.extend(0, block[start : start + cut])
            headers = decoder.extend(frames.END_HEADERS, b"")
        except ConnectionFailure as failure:
            assert failure.code in (ErrorCode.COMPRESSION_ERROR, ErrorCode.ENHANCE_YOUR_CALM)  # noqa: PT017
            return
        assert headers is not None
        assert sum(len(name) + len(value) + 32 for name, value in headers) <= LIMITS.max_header_bytes


@given(pieces=_input)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_input_keeps_the_next_client_from_being_served(server: Serving, pieces: list[bytes]) -> None:
    with Peer(server.path) as peer:
        peer.send(peer.headers(1), *pieces)
    assert served(server.path)
