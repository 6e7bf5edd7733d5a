"""Frames: the same messages however the bytes are divided, and named errors for what is no message."""

from __future__ import annotations

import gc
import itertools
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConnectError, FrameError
from atoll.wire.framing import (
    MAX_FRAME,
    MAX_LENGTH,
    MAX_PIECE,
    FrameDecoder,
    FrameLimits,
    encode,
    frame_header,
    frame_length,
    link_header,
    piece_header,
)


class Note(msgspec.Struct, frozen=True, array_like=True, tag=1):
    text: str


class Count(msgspec.Struct, frozen=True, array_like=True, tag=2):
    number: int


LIMIT = 1000
MESSAGES = st.lists(st.one_of(st.builds(Note, st.text(max_size=60)), st.builds(Count, st.integers(0, 2**40))))


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return frame_header(len(body)) + body


def decoded(data: bytes, cuts: list[int]) -> tuple[list[Any], str]:
    """The messages that come out of `data`, divided at `cuts`, and the error that ends them."""
    decoder = FrameDecoder(Note | Count, LIMIT)
    messages: list[Any] = []
    buffer = bytearray(len(data))  # reused for each part, as connections do
    positions = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    try:
        for start, stop in itertools.pairwise(positions):
            buffer[: stop - start] = data[start:stop]
            messages.extend(decoder.feed(memoryview(buffer)[: stop - start]))
            assert decoder.pending_bytes <= 2 * LIMIT + 4, "a frame, and a message in pieces"
    except FrameError as error:
        return messages, str(error)
    return messages, ""


@given(MESSAGES, st.lists(st.integers(0, 700), max_size=12))
def test_any_division_of_frames_gives_the_same_messages(messages: list[Any], cuts: list[int]) -> None:
    assert decoded(b"".join(map(frame, messages)), cuts) == (messages, "")


def in_pieces(message: Any, sizes: list[int], between: list[Any]) -> bytes:
    """The frames of a message in pieces of these sizes, and the rest, each but the last with another behind it."""
    body = msgspec.msgpack.encode(message)
    data, others = b"", iter(between)
    for size in [*sizes, len(body)]:
        piece, body = body[:size], body[size:]
        data += piece_header(len(piece), not body) + piece
        if not body:
            break
        other = next(others, None)
        data += b"" if other is None else frame(other)
    return data


@given(MESSAGES, st.lists(st.integers(1, 60), max_size=6), st.lists(st.integers(0, 700), max_size=12))
def test_messages_between_the_pieces_of_another_overtake_it(
    between: list[Any], sizes: list[int], cuts: list[int]
) -> None:
    large = Note("x" * 400)
    data = in_pieces(large, sizes, between) + frame(Count(7))
    overtook = between[: len(sizes)]
    assert decoded(data, cuts) == ([*overtook, large, Count(7)], "")


def test_of_a_message_whose_last_piece_never_comes_no_more_than_the_limit_is_kept() -> None:
    decoder = FrameDecoder(Note, LIMIT)
    piece = piece_header(100, False) + bytes(100)
    for _ in range(LIMIT // 100):
        assert list(decoder.feed(memoryview(piece))) == []
    assert decoder.pending_bytes == LIMIT
    with pytest.raises(FrameError, match="in pieces is over the limit"):
        list(decoder.feed(memoryview(piece)))
    assert decoder.pending_bytes <= LIMIT + len(piece)


def test_frames_that_come_byte_by_byte_are_the_same_messages() -> None:
    messages = [Note("x" * 50), Count(3), Note("")]
    data = b"".join(map(frame, messages))
    assert decoded(data, list(range(len(data)))) == (messages, "")


NO_MESSAGES = {
    "too long": (struct.pack("<I", LIMIT + 1), f"over the limit of {LIMIT}"),
    "all ones": (b"\xff\xff\xff\xff", "over the limit"),
    "a piece that is too long": (
        piece_header(MAX_PIECE + 1, False),
        f"a piece of {MAX_PIECE + 1} bytes is over the limit",
    ),
    "a piece without bytes": (piece_header(0, False), "a piece of a message has no bytes"),
    "pieces that come to too much": (
        (piece_header(600, False) + bytes(600)) * 2,
        f"a message in pieces is over the limit of {LIMIT} bytes",
    ),
    "pieces of no message": (piece_header(1, False) + b"\xc1" + piece_header(1, True) + b"\xc1", "invalid message"),
    "empty": (struct.pack("<I", 0), "invalid message"),
    "no msgpack": (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "invalid message"),
    "an unknown tag": (frame([3, "x"]), "invalid message"),
    "a field of another type": (frame([1, 17]), "invalid message"),
}


@given(st.lists(st.integers(0, 60), max_size=6))
@pytest.mark.parametrize(("data", "reason"), NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_named_after_the_messages_before_it(data: bytes, reason: str, cuts: list[int]) -> None:
    messages, error = decoded(frame(Count(1)) + frame(Note("a")) + data + frame(Count(2)), cuts)
    assert messages == [Count(1), Note("a")]
    assert reason in error


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6))
def test_any_bytes_give_the_same_messages_and_error_however_they_are_divided(data: bytes, cuts: list[int]) -> None:
    assert decoded(data, cuts) == decoded(data, [])


def test_a_frame_that_is_too_long_is_refused_before_its_bytes_are_kept() -> None:
    decoder = FrameDecoder(Note, LIMIT)
    with pytest.raises(FrameError, match="over the limit"):
        list(decoder.feed(memoryview(struct.pack("<I", LIMIT + 1))))
    assert decoder.pending_bytes == 0


def test_a_header_states_the_length_within_the_limit() -> None:
    assert frame_length(frame_header(17)) == 17
    with pytest.raises(ConnectError, match="over the limit"):
        frame_length(frame_header(MAX_FRAME + 1))


@pytest.mark.parametrize("body", [b"\x92\x01\xa2\xff\xfe", b"\x91" * 100_000 + b"\x01", b"\xc1"])
def test_what_msgpack_cannot_decode_is_a_frame_error(body: bytes) -> None:
    """Text that is no UTF-8, deep nesting, and a byte that has no meaning."""
    decoder = FrameDecoder(Any)
    with pytest.raises(FrameError, match="invalid message"):
        list(decoder.feed(memoryview(frame_header(len(body)) + body)))


def test_a_limit_that_is_raised_holds_for_the_next_frame_of_the_same_bytes() -> None:
    decoder = FrameDecoder(Note, 30)
    found = []
    for message in decoder.feed(memoryview(frame(Note("x")) + frame(Note("y" * 100)))):
        found.append(message)
        decoder.limit = 1000
    assert found == [Note("x"), Note("y" * 100)]


@pytest.mark.parametrize("cut", [1, 3, 5, 9, 10, 4096])
def test_limits_of_an_untrusted_peer_go_by_the_tags_of_messages(cut: int) -> None:
    class Small(msgspec.Struct, array_like=True, tag=42):
        content: bytes

    class Large(msgspec.Struct, array_like=True, tag=175):
        content: bytes

    class Other(msgspec.Struct, array_like=True, tag=3):
        content: bytes

    def passes(message: Any) -> bool:
        decoder = FrameDecoder(Small | Large | Other)
        decoder.set_limits(FrameLimits({42: 100, 175: 10_000}, 1000))
        data = frame(message)
        found: list[Any] = []
        try:
            for start in range(0, len(data), cut):
                found += decoder.feed(memoryview(data)[start : start + cut])
        except FrameError:
            return decoder.pending_bytes > cut + 16  # it is refused before its bytes are kept
        return found == [message]

    sizes = (50, 500, 5000, 50_000)
    results = {kind: [passes(kind(bytes(size))) for size in sizes] for kind in (Small, Large, Other)}
    assert results == {
        Small: [True, False, False, False],
        Large: [True, True, True, False],
        Other: [True, True, False, False],
    }


@pytest.mark.parametrize("tag", [b"\xce\0\0\0\x2a", b"\xd0\x2a", b"\xd1\0\x2a", b"\xcf" + bytes(7) + b"\x2a"])
def test_no_form_of_a_tag_hides_it_from_its_limit(tag: bytes) -> None:
    class Small(msgspec.Struct, array_like=True, tag=42):
        content: bytes

    def refused(body: bytes) -> bool:
        assert msgspec.msgpack.decode(body, type=Small) == Small(bytes(500))
        decoder = FrameDecoder(Small)
        decoder.set_limits(FrameLimits({42: 100}, 1000))
        with pytest.raises(FrameError, match="over the limit"):
            list(decoder.feed(memoryview(frame_header(len(body)) + body)))
        return True

    content = msgspec.msgpack.encode(bytes(500))
    assert refused(b"\x92" + tag + content)
    assert refused(b"\xdd\0\0\0\x02\x2a" + content)


def test_the_decoder_of_a_connection_leaves_nothing_for_the_garbage_collector() -> None:
    FrameDecoder(Note | Count)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            FrameDecoder(Note | Count)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_message_whose_length_does_not_fit_into_a_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_LENGTH | piece_header(0, True)[3] << 24 != MAX_LENGTH, "a longer one would be a frame of another kind"
    assert struct.unpack("<I", link_header(0))[0] == MAX_LENGTH + 1
    monkeypatch.setattr("atoll.wire.framing.MAX_LENGTH", 100)
    assert len(encode(Note("x" * 90))) < 100 + 4
    with pytest.raises(FrameError, match=r"a Note of 10\d bytes cannot be sent: a message has at most 100 bytes"):
        encode(Note("x" * 100))
