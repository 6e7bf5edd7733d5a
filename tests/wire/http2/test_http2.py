"""The HTTP/2 layer against clients that break its rules: each fault is answered, and the server lives on."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.wire.grpc import Call, Limits
from atoll.wire.http2 import frames
from atoll.wire.http2.connection import Http2Connection
from atoll.wire.http2.frames import PREFACE, ErrorCode, HeaderList, Setting
from atoll.wire.http2.stream import Stream
from tests.wire.http2.http2_peer import REQUEST, Peer, Serving, echo, frame, message, served

DATA, HEADERS, SETTINGS, PING = frames.DATA, frames.HEADERS, frames.SETTINGS, frames.PING
WINDOW = 1 << 20


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Calls of the method that answers nothing."""
    return []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, calls: list[Call]) -> Iterator[Serving]:
    path = str(tmp_path_factory.mktemp("http2") / "s")
    limits = Limits(
        stream_window_bytes=WINDOW,
        connection_window_bytes=2 * WINDOW,
        max_concurrent_streams=8,
        nuisance_burst=100,
        nuisance_per_second=0.0,
    )
    with Serving({"/test.Test/Echo": echo, "/test.Test/Keep": calls.append}, path, limits=limits) as serving:
        yield serving
        assert served(path)


@pytest.fixture
def peer(server: Serving) -> Iterator[Peer]:
    with Peer(server.path) as peer:
        yield peer


def keep() -> list[tuple[str, str]]:
    return [(name, "/test.Test/Keep" if name == ":path" else value) for name, value in REQUEST]


def test_garbage_instead_of_the_preface_is_a_protocol_error(server: Serving) -> None:
    with Peer(server.path, greet=False) as peer:
        peer.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert peer.goaway_code() == ErrorCode.PROTOCOL_ERROR


def test_a_preface_in_single_bytes_is_taken(server: Serving) -> None:
    with Peer(server.path, greet=False) as peer:
        for byte in PREFACE + frames.settings_frame(()):
            peer.send(bytes([byte]))
        peer.sync()


def test_a_client_that_says_nothing_is_dropped(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with Serving({}, path, limits=Limits(handshake_seconds=0.01)), Peer(path, greet=False) as peer:
        assert peer.goaway_code() == ErrorCode.SETTINGS_TIMEOUT


def test_the_first_frame_must_be_settings(server: Serving) -> None:
    with Peer(server.path, greet=False) as peer:
        peer.send(PREFACE, frame(PING, 0, 0, b"12345678"))
        assert peer.goaway_code() == ErrorCode.PROTOCOL_ERROR


def test_settings_are_advertised_and_acknowledged(peer: Peer) -> None:
    _, flags, _, payload = peer.read_until(SETTINGS)
    assert not flags
    assert dict(struct.iter_unpack(">HI", payload))[Setting.MAX_FRAME_SIZE] == 1 << 20
    assert peer.read_until(SETTINGS)[1] == frames.ACK


def test_a_ping_is_answered_with_its_payload(peer: Peer) -> None:
    peer.send(frame(PING, 0, 0, b"12345678"))
    assert peer.read_until(PING)[1:] == (frames.ACK, 0, b"12345678")


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (frame(PING, 0, 0, b"short"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(PING, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(SETTINGS, frames.ACK, 0, b"123456"), ErrorCode.FRAME_SIZE_ERROR),
        (frames.settings_frame([(Setting.ENABLE_PUSH, 2)]), ErrorCode.PROTOCOL_ERROR),
        (frames.settings_frame([(Setting.MAX_FRAME_SIZE, 1)]), ErrorCode.PROTOCOL_ERROR),
        (frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 2**31)]), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(frames.PUSH_PROMISE, 0, 1, b"1234"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PRIORITY, 0, 0, b"12345"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PRIORITY, 0, 1, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.CONTINUATION, frames.END_HEADERS, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, frames.END_HEADERS, 0), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, frames.END_HEADERS, 2), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(HEADERS, frames.END_HEADERS | frames.PADDED, 1, b"\x09abc"), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, frames.END_HEADERS | frames.PRIORITY_FLAG, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(HEADERS, 0, 1) + frame(PING, 0, 0, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frame(DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(DATA, 0, 2, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(DATA, frames.PADDED, 1), ErrorCode.FRAME_SIZE_ERROR),
        (frame(DATA, frames.PADDED, 1, b"\x09abc"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 1, b"1234"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 1, b"123"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 1, b"1234"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"123"), ErrorCode.FRAME_SIZE_ERROR),
        (frames.window_update(0, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (frames.frame_header.pack((1 << 20) + 1 << 8 | DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame_header.pack((1 << 20) + 1 << 8 | 99, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame_header.pack((1 << 20) << 8 | HEADERS, 0, 1), ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_a_frame_against_the_rules_ends_the_connection(peer: Peer, bad: bytes, code: ErrorCode) -> None:
    peer.send(bad)
    assert peer.goaway_code() == code


def test_frames_of_unknown_types_are_skipped(peer: Peer) -> None:
    peer.send(frame(99, 255, 7, bytes(300_000)))
    peer.sync()


def test_priority_is_ignored(peer: Peer) -> None:
    peer.send(frame(frames.PRIORITY, 0, 9, b"\0\0\0\0\1"))
    peer.sync()


@pytest.mark.parametrize("padding", [0, 1, 255])
def test_padding_is_removed(peer: Peer, padding: int) -> None:
    body = bytes([padding]) + message(b"content") + bytes(padding)
    peer.send(peer.headers(1), frame(DATA, frames.PADDED | frames.END_STREAM, 1, body))
    assert peer.body(1, 12) == message(b"content")
    assert peer.trailers(1)["grpc-status"] == "0"


def test_a_request_in_single_bytes_is_answered(peer: Peer) -> None:
    padded = frame(DATA, frames.PADDED, 1, b"\3" + message(b"ab") + b"\0\0\0")
    request = peer.headers(1) + padded + frame(DATA, frames.END_STREAM, 1, message(b"cd"))
    for byte in request:
        peer.send(bytes([byte]))
    assert peer.body(1, 14) == message(b"ab") + message(b"cd")
    assert peer.trailers(1)["grpc-status"] == "0"


def test_headers_may_come_in_continuations_with_priority_and_padding(peer: Peer) -> None:
    block = peer.encoder.encode(REQUEST)
    first = b"\2" + b"\0\0\0\0\1" + block[:5] + b"\0\0"
    peer.send(
        frame(HEADERS, frames.PADDED | frames.PRIORITY_FLAG | frames.END_STREAM, 1, first),
        frame(frames.CONTINUATION, 0, 1, block[5:9]),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[9:]),
    )
    assert peer.trailers(1)["grpc-status"] == "0"


@pytest.mark.parametrize(
    "headers",
    [
        REQUEST[1:],
        [*REQUEST, (":path", "/late")],
        [*REQUEST, ("Upper", "case")],
        [*REQUEST, ("connection", "close")],
        [*REQUEST, ("te", "gzip")],
        [*REQUEST, ("x", "a\r\nb")],
        [(":status", "200"), *REQUEST],
        [REQUEST[0], *REQUEST],
    ],
)
def test_a_malformed_request_resets_its_stream_only(peer: Peer, headers: Any) -> None:
    peer.send(peer.headers(1, headers))
    assert peer.reset_code(1) == ErrorCode.PROTOCOL_ERROR
    peer.sync()


def test_data_after_the_end_of_a_stream_resets_it(peer: Peer) -> None:
    peer.send(peer.headers(1, keep()), frame(DATA, frames.END_STREAM, 1), frame(DATA, 0, 1, b"more"))
    assert peer.reset_code(1) == ErrorCode.STREAM_CLOSED


def test_headers_for_a_closed_stream_are_refused(peer: Peer) -> None:
    peer.send(peer.headers(3, flags=frames.END_HEADERS | frames.END_STREAM))
    peer.trailers(3)
    peer.send(peer.headers(1))
    assert peer.reset_code(1) == ErrorCode.STREAM_CLOSED


def test_trailers_of_a_client_end_its_request(peer: Peer) -> None:
    peer.send(peer.headers(1), peer.headers(1, [("x", "y")], frames.END_HEADERS | frames.END_STREAM))
    assert peer.trailers(1)["grpc-status"] == "0"


def test_a_second_header_block_that_ends_nothing_resets_the_stream(peer: Peer) -> None:
    peer.send(peer.headers(1, keep()), peer.headers(1, [("x", "y")]))
    assert peer.reset_code(1) == ErrorCode.PROTOCOL_ERROR


def test_a_window_update_of_zero_resets_the_stream(peer: Peer) -> None:
    peer.send(peer.headers(1, keep()), frame(frames.WINDOW_UPDATE, 0, 1, bytes(4)))
    assert peer.reset_code(1) == ErrorCode.PROTOCOL_ERROR


def test_a_stream_window_above_its_maximum_resets_the_stream(peer: Peer) -> None:
    peer.send(peer.headers(1, keep()), frames.window_update(1, 2**31 - 1))
    assert peer.reset_code(1) == ErrorCode.FLOW_CONTROL_ERROR


def test_more_streams_than_allowed_are_refused(peer: Peer) -> None:
    peer.send(*(peer.headers(number, keep()) for number in range(1, 19, 2)))
    assert peer.reset_code(17) == ErrorCode.REFUSED_STREAM
    peer.send(frames.rst_stream(1, ErrorCode.CANCEL), peer.headers(19))
    peer.send(frame(DATA, frames.END_STREAM, 19, message(b"x")))
    assert peer.body(19, 6) == message(b"x")


def test_more_data_than_the_stream_window_resets_the_stream(server: Serving, peer: Peer, calls: list[Call]) -> None:
    peer.send(peer.headers(1, keep()))
    peer.sync()
    server.call(calls[-1].pause)
    peer.send(frame(DATA, 0, 1, bytes(WINDOW - 5)))
    assert not [got for got in peer.sync() if got[0] in (frames.RST_STREAM, frames.WINDOW_UPDATE) and got[2]]
    peer.send(frame(DATA, 0, 1, bytes(6)))
    assert peer.reset_code(1) == ErrorCode.FLOW_CONTROL_ERROR


def test_more_data_than_the_connection_window_ends_the_connection(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    limits = Limits(connection_window_bytes=70_000, stream_window_bytes=1 << 20)
    with Serving({"/test.Test/Echo": echo}, path, limits=limits), Peer(path) as peer:
        peer.send(peer.headers(1), frame(DATA, 0, 1, bytes(70_001)))
        assert peer.goaway_code() == ErrorCode.FLOW_CONTROL_ERROR


def test_windows_are_granted_anew_as_messages_are_taken(peer: Peer) -> None:
    peer.send(peer.headers(1, keep()))
    for _ in range(20):
        peer.send(frame(DATA, 0, 1, message(bytes(WINDOW // 2 - 5))))
        assert peer.read_until(frames.WINDOW_UPDATE, 1)


def test_data_on_a_reset_stream_still_counts_for_the_connection_window(peer: Peer) -> None:
    peer.send(peer.headers(1), frames.rst_stream(1, ErrorCode.CANCEL))
    peer.sync()
    for _ in range(4):
        peer.send(frame(DATA, 0, 1, bytes(WINDOW)))
        assert peer.read_until(frames.WINDOW_UPDATE, 0)


def test_nothing_is_sent_beyond_the_stream_window(peer: Peer) -> None:
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 10)]))
    peer.send(peer.headers(1), frame(DATA, frames.END_STREAM, 1, message(b"x" * 20)))
    assert sum(len(got[3]) for got in peer.sync() if got[0] == DATA) == 10
    peer.send(frames.window_update(1, 5))
    assert len(peer.read_until(DATA)[3]) == 5
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 100)]))
    assert len(peer.read_until(DATA)[3]) == 10
    assert peer.trailers(1)["grpc-status"] == "0"


def test_a_stream_window_may_become_negative(peer: Peer) -> None:
    peer.send(peer.headers(1), frame(DATA, 0, 1, message(b"x" * 95)))
    peer.body(1, 100)
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 50)]))
    peer.send(frames.window_update(1, 40), frame(DATA, 0, 1, message(b"y")))
    assert not [got for got in peer.sync() if got[0] == DATA]
    peer.send(frames.window_update(1, 20))
    assert peer.body(1, 6) == message(b"y")


def test_nothing_is_sent_beyond_the_connection_window(peer: Peer) -> None:
    content = message(bytes(40_000))
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 2**31 - 1)]))
    for number in (1, 3):
        peer.send(peer.headers(number), frame(DATA, frames.END_STREAM, number, content))
    sent = 0
    while sent < frames.DEFAULT_WINDOW:
        sent += len(peer.read_until(DATA)[3])
    assert not [got for got in peer.sync() if got[0] == DATA]
    peer.send(frames.window_update(0, 100_000))
    while sent < 2 * len(content):
        sent += len(peer.read_until(DATA)[3])
    assert sent == 2 * len(content)


def test_frames_obey_the_peers_maximum_size(peer: Peer) -> None:
    peer.send(frames.settings_frame([(Setting.MAX_FRAME_SIZE, 20_000)]))
    peer.send(peer.headers(1), frame(DATA, frames.END_STREAM, 1, message(bytes(50_000))))
    sizes = []
    while sum(sizes) < 50_005:
        sizes.append(len(peer.read_until(DATA)[3]))
    assert max(sizes) <= 20_000


def test_a_header_bomb_ends_the_connection(peer: Peer) -> None:
    # One entry of 4000 bytes in the compression table, referred to 1000 times at a byte each.
    block = peer.encoder.encode(REQUEST) + b"\x40\x01x\x7f\xa1\x1e" + bytes(4000) + b"\xbe" * 1000
    peer.send(frame(HEADERS, frames.END_HEADERS, 1, block))
    assert peer.goaway_code() == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("piece", [b"", bytes(10_000)])
def test_a_flood_of_continuations_ends_the_connection(peer: Peer, piece: bytes) -> None:
    peer.send(frame(HEADERS, 0, 1), *(frame(frames.CONTINUATION, 0, 1, piece) for _ in range(100)))
    assert peer.goaway_code() == ErrorCode.ENHANCE_YOUR_CALM


def test_a_flood_of_resets_ends_the_connection(peer: Peer) -> None:
    for number in range(1, 401, 2):
        peer.send(peer.headers(number, keep()), frames.rst_stream(number, ErrorCode.CANCEL))
    assert peer.goaway_code() == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("nuisance", [frame(DATA, 0, 1), frame(SETTINGS, 0, 0), frame(99, 0, 1)])
def test_a_flood_of_empty_frames_ends_the_connection(peer: Peer, nuisance: bytes) -> None:
    peer.send(peer.headers(1, keep()), nuisance * 200)
    assert peer.goaway_code() == ErrorCode.ENHANCE_YOUR_CALM


def test_a_client_that_pings_and_never_reads_is_not_read_from(server: Serving) -> None:
    with Peer(server.path) as peer:
        peer.sync()
        peer.socket.setblocking(False)
        pings = frame(PING, 0, 0, b"12345678") * 10_000
        sent = 0
        try:
            while sent < 256 << 20:
                sent += peer.socket.send(pings)
                server.call(lambda: None)
        except BlockingIOError:
            pass
        assert sent < 64 << 20
        assert server.server.statistics().queued_bytes < 8 << 20
        assert served(server.path)


def test_a_goaway_of_the_client_leaves_its_calls(peer: Peer) -> None:
    peer.send(peer.headers(1), frames.goaway(0, ErrorCode.NO_ERROR, b"x" * 100_000))
    peer.send(frame(DATA, frames.END_STREAM, 1, message(b"still")))
    assert peer.body(1, 10) == message(b"still")


class _Transport(asyncio.Transport):
    """Takes everything."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class _Echo:
    """A consumer that sends back every byte."""

    def __init__(self, stream: Stream) -> None:
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


@given(pieces=_input, cut=st.integers(1, 50), preface=st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_input_raises_out_of_the_protocol(pieces: list[bytes], cut: int, preface: bool) -> None:
    def request(stream: Stream, headers: HeaderList) -> None:
        stream.consumer = _Echo(stream)

    async def feed() -> None:
        transport, lost = _Transport(), []
        connection = Http2Connection(request, lambda made: None, lost.append, Limits())
        connection.connection_made(transport)
        data = b"".join(pieces)
        if preface:
            data = PREFACE + frames.settings_frame(()) + data
        for start in range(0, len(data), cut):
            if transport.closed:
                break
            chunk = data[start : start + cut]
            connection.get_buffer(-1)[: len(chunk)] = chunk
            connection.buffer_updated(len(chunk))
        await asyncio.sleep(0)
        connection.connection_lost(None)
        assert lost == [connection]
        assert not connection.streams

    asyncio.run(feed())


@given(pieces=_input)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_input_keeps_the_next_client_from_being_served(server: Serving, pieces: list[bytes]) -> None:
    with Peer(server.path) as peer:
        peer.send(peer.headers(1), *pieces)
    assert served(server.path)


def test_an_idle_connection_costs_no_descriptor_after_it_is_gone(server: Serving) -> None:
    served(server.path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert served(server.path)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
