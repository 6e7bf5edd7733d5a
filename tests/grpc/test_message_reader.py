"""Tests of reading messages without a connection: the result does not depend on how a body is divided or paused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.grpc import GrpcError, StatusCode
from atoll.grpc.http2.http2_stream import Http2Stream
from atoll.grpc.message_reader import SMALL_MESSAGE_BYTES, MessageReader, Traffic
from tests.grpc.http2.http2_peer import message

WINDOW = 1 << 24
MAX_MESSAGE = 1 << 20
MAX_PIECES = 1000  # of a body


class _Sender:
    """A stand-in for the sender of a stream. Readers send nothing."""

    def make_ready(self, stream: Http2Stream) -> None:
        raise AssertionError("a reader sends nothing")

    def control(self, frame: bytes) -> None:
        pass


def reader_for(stream: Http2Stream, traffic: Traffic, on_error: Callable[[Exception], None]) -> MessageReader:
    return MessageReader(stream, traffic, on_error)


def feed(reader: MessageReader, body: bytes, direct: bool) -> None:
    """Feed a part of the body, using `reserve` if the reader offers memory and `direct` is set."""
    view, start = memoryview(body), 0
    while start < len(body):
        room = reader.reserve(len(body) - start) if direct else None
        if room is None:
            reader.data(view, start, len(body))
            return
        room[:] = view[start : start + len(room)]
        start += len(room)
        reader.filled(len(room))


_sizes = st.lists(
    st.one_of(st.integers(0, 40), st.sampled_from([SMALL_MESSAGE_BYTES, SMALL_MESSAGE_BYTES + 1, 200_000]))
)


@given(
    sizes=_sizes,
    cuts=st.lists(st.integers(1, 70_000), min_size=1, max_size=8),
    pauses=st.lists(st.booleans(), min_size=1, max_size=8),
    direct=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_same_messages_come_however_the_body_is_cut_and_paused(
    sizes: list[int], cuts: list[int], pauses: list[bool], direct: bool
) -> None:
    contents = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    body = b"".join(map(message, contents))
    seen: list[bytes | str] = []
    traffic = Traffic(10 * MAX_MESSAGE, MAX_MESSAGE)

    async def run() -> None:
        stream = Http2Stream(_Sender(), 1, WINDOW, WINDOW)
        reader = reader_for(stream, traffic, lambda error: pytest.fail(repr(error)))

        def on_message(content: bytes | memoryview) -> None:
            assert not stream.paused
            assert isinstance(content, bytes) == (len(content) <= SMALL_MESSAGE_BYTES)
            seen.append(bytes(content))
            stream.paused = pauses[len(seen) % len(pauses)]

        reader.set_handlers(on_message, lambda: seen.append("end"))
        start = turn = 0
        least = len(body) // MAX_PIECES
        while start < len(body):
            cut = least + cuts[turn % len(cuts)]
            feed(reader, body[start : start + cut], direct)
            start, turn = start + cut, turn + 1
            if turn % 3 == 0:
                reader.resume()
                await asyncio.sleep(0)
        reader.half_closed()
        while stream.paused:
            reader.resume()
            await asyncio.sleep(0)
        assert stream.held_bytes == 0

    asyncio.run(run())
    assert seen == [*contents, "end"]
    assert traffic.messages_in == len(contents)
    assert traffic.incomplete_bytes == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"\1\0\0\0\1x", StatusCode.UNIMPLEMENTED),
        (b"\xff\0\0\0\0", StatusCode.UNIMPLEMENTED),
        ((MAX_MESSAGE + 1).to_bytes(5, "big"), StatusCode.RESOURCE_EXHAUSTED),
        (MAX_MESSAGE.to_bytes(5, "big"), StatusCode.RESOURCE_EXHAUSTED),
        (b"\0\0\0\0\2x", StatusCode.INTERNAL),
        (b"\0\0", StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("cut", [1, 100])
def test_a_body_that_cannot_be_read_is_an_error_once(body: bytes, code: StatusCode, cut: int) -> None:
    errors: list[Exception] = []

    async def run() -> None:
        reader = reader_for(
            Http2Stream(_Sender(), 1, WINDOW, WINDOW), Traffic(MAX_MESSAGE - 1, MAX_MESSAGE), lambda error: fail(error)
        )

        def fail(error: Exception) -> None:
            errors.append(error)
            reader.close()

        reader.set_handlers(lambda content: pytest.fail("a message"), lambda: pytest.fail("an end"))
        for start in range(0, len(body), cut):
            feed(reader, body[start : start + cut], False)
        reader.half_closed()

    asyncio.run(run())
    assert [error.code for error in errors if isinstance(error, GrpcError)] == [code]
    assert len(errors) == 1


def test_memory_that_is_not_to_be_had_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = []
    traffic = Traffic(MAX_MESSAGE, MAX_MESSAGE)

    def no_memory(*arguments: object) -> None:
        raise MemoryError

    async def run() -> None:
        reader = reader_for(Http2Stream(_Sender(), 1, WINDOW, WINDOW), traffic, errors.append)
        feed(reader, (100_000).to_bytes(5, "big"), False)

    monkeypatch.setattr("atoll.grpc.message_reader.np.empty", no_memory)
    asyncio.run(run())
    assert [str(error) for error in errors] == ["RESOURCE_EXHAUSTED: out of memory for a message of 100000 bytes"]
    assert traffic.incomplete_bytes == 0
