"""Random and mutated input: it never raises, never costs more than the limits, and never harms another client."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.wire.grpc import Limits
from atoll.wire.http2 import frames
from atoll.wire.http2.connection import Http2Connection
from atoll.wire.http2.frames import PREFACE, HeaderList
from atoll.wire.http2.stream import Stream
from tests.wire.grpc.serving import Serving
from tests.wire.http2.http2_peer import Peer, frame, served


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
