"""Tests of the rules of RFC 9113: a violation gets the right error code, and the server continues."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import PREFACE, ErrorCode, Setting
from tests.grpc.http2.http2_peer import KEEP, REQUEST, Peer, frame, message
from tests.grpc.serving import Serving

DATA, HEADERS, SETTINGS, PING = frames.DATA, frames.HEADERS, frames.SETTINGS, frames.PING


def test_garbage_instead_of_the_preface_is_a_protocol_error(server: Serving) -> None:
    with Peer(server.path, greet=False) as peer:
        peer.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert peer.goaway_code() == ErrorCode.PROTOCOL_ERROR


def test_a_preface_in_single_bytes_is_taken(server: Serving) -> None:
    with Peer(server.path, greet=False) as peer:
        for byte in PREFACE + frames.settings_frame(()):
            peer.send(bytes([byte]))
        peer.sync()


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
        (frame(HEADERS, 0, 1) + frame(HEADERS, frames.END_HEADERS, 3), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1) + frame(frames.CONTINUATION, frames.END_HEADERS, 3), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1) + frame(DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1) + frame(99, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.CONTINUATION, frames.END_HEADERS, 0), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, frames.END_HEADERS, 1, b"") + frame(frames.CONTINUATION, 4, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, frames.END_HEADERS | frames.PADDED, 1), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, frames.END_HEADERS | 0x28, 1, b"\2" + bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.RST_STREAM, 0, 0, b"1234"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 2, b"1234"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 2, b"1234"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frames.settings_frame([(Setting.MAX_FRAME_SIZE, 2**24)]), ErrorCode.PROTOCOL_ERROR),
        (frames.frame_header.pack((1 << 20) + 1 << 8 | DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame_header.pack((1 << 20) + 1 << 8 | 99, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame_header.pack((1 << 20) << 8 | HEADERS, 0, 1), ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_a_frame_against_the_rules_ends_the_connection(peer: Peer, bad: bytes, code: ErrorCode) -> None:
    peer.send(bad)
    assert peer.goaway_code() == code


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b"\x80", id="index 0"),
        pytest.param(b"\xc6", id="index beyond the table"),
        pytest.param(b"\x00\x05ab", id="string beyond the block"),
        pytest.param(b"\xff" + b"\xff" * 30 + b"\x01", id="integer without end"),
        pytest.param(b"\x3f\xe2\x1f", id="table larger than granted"),
        pytest.param(b"\x82\x20", id="table resized inside a block"),
        pytest.param(b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff", id="padding of a Huffman code too long"),
        pytest.param(b"\x00\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90", id="padding of a Huffman code of zeros"),
    ],
)
def test_a_header_block_that_does_not_decode_ends_the_connection(peer: Peer, block: bytes) -> None:
    peer.send(frame(HEADERS, frames.END_HEADERS, 1, block))
    assert peer.goaway_code() == ErrorCode.COMPRESSION_ERROR


@pytest.mark.parametrize(
    "frames_",
    [
        pytest.param(frame(PING, frames.ACK, 0, b"12345678"), id="acknowledgement of no PING"),
        pytest.param(frame(PING, 0x16, 0, b"12345678"), id="unknown flags"),
        pytest.param(frame(SETTINGS, frames.ACK, 0), id="acknowledgement of no SETTINGS"),
        pytest.param(frames.settings_frame([(0xFE03, 1), (0x99, 2**32 - 1)]), id="unknown settings"),
        pytest.param(frames.settings_frame([(4, 0), (4, 100_000)]), id="the last of equal settings counts"),
        pytest.param(frames.settings_frame([(Setting.HEADER_TABLE_SIZE, 0)]), id="no header table"),
        pytest.param(frames.settings_frame([(Setting.HEADER_TABLE_SIZE, 2**32 - 1)]), id="a huge header table"),
        pytest.param(frame(frames.PRIORITY, 0, 1, b"\0\0\0\1\1"), id="a stream that depends on itself"),
        pytest.param(frame(frames.WINDOW_UPDATE, 0, 0, b"\x80\0\0\1"), id="reserved bit of WINDOW_UPDATE"),
        pytest.param(frames.frame_header.pack(8 << 8 | PING, 0, 2**31) + bytes(8), id="reserved bit of a number"),
        pytest.param(frame(frames.GOAWAY, 0, 0, b""), id="GOAWAY without its fields"),
        pytest.param(frame(99, 0xFF, 2**31 - 1, b"x"), id="unknown type"),
    ],
)
def test_what_the_rules_allow_is_taken(peer: Peer, frames_: bytes) -> None:
    peer.send(frames_, peer.headers(1), frame(DATA, frames.END_STREAM, 1, message(b"content")))
    assert peer.body(1, 12) == message(b"content")
    assert peer.trailers(1)["grpc-status"] == "0"


def test_the_whole_frame_may_be_padding(peer: Peer) -> None:
    peer.send(peer.headers(1), frame(DATA, frames.PADDED, 1, b"\3" + bytes(3)))
    peer.send(frame(DATA, frames.PADDED | frames.END_STREAM, 1, b"\0" + message(b"x")))
    assert peer.body(1, 6) == message(b"x")


def test_padding_of_data_that_is_as_long_as_its_frame_ends_the_connection(peer: Peer) -> None:
    peer.send(peer.headers(1, KEEP), frame(DATA, frames.PADDED, 1, b"\4" + bytes(3)))
    assert peer.goaway_code() == ErrorCode.PROTOCOL_ERROR


def test_headers_after_the_end_of_a_stream_reset_it(peer: Peer) -> None:
    peer.send(peer.headers(1, KEEP, frames.END_HEADERS | frames.END_STREAM), peer.headers(1, [("x", "y")]))
    assert peer.reset_code(1) == ErrorCode.STREAM_CLOSED


def test_frames_of_a_stream_that_was_reset_are_ignored(peer: Peer) -> None:
    peer.send(peer.headers(1, KEEP), frames.rst_stream(1, ErrorCode.CANCEL))
    late = (frame(DATA, 0, 1, b"late"), frames.window_update(1, 1), frames.rst_stream(1, ErrorCode.CANCEL))
    peer.send(*late, frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\1"))
    assert not [got for got in peer.sync() if got[2] == 1]


def test_trailers_with_a_pseudo_header_reset_the_stream(peer: Peer) -> None:
    ends = frames.END_HEADERS | frames.END_STREAM
    peer.send(peer.headers(1, KEEP), peer.headers(1, [(":path", "/other")], ends))
    assert peer.reset_code(1) == ErrorCode.PROTOCOL_ERROR


def test_stream_numbers_may_be_left_out(peer: Peer) -> None:
    for number in (1, 9, 2**31 - 1):
        peer.send(peer.headers(number), frame(DATA, frames.END_STREAM, number, message(b"x")))
        assert peer.body(number, 6) == message(b"x")


def test_headers_up_to_the_limit_are_taken(peer: Peer) -> None:
    more = [(f"x-{number}", "v" * 4000) for number in range(15)]
    blocks = peer.encoder.encode(REQUEST + more)
    pieces = [blocks[start : start + 16_000] for start in range(0, len(blocks), 16_000)]
    peer.send(frame(HEADERS, 0, 1, pieces[0]))
    peer.send(*(frame(frames.CONTINUATION, 0, 1, piece) for piece in pieces[1:]))
    peer.send(frame(frames.CONTINUATION, frames.END_HEADERS, 1), frame(DATA, frames.END_STREAM, 1, message(b"x")))
    assert peer.body(1, 6) == message(b"x")


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
        [*REQUEST[:1], *REQUEST[2:]],
        [*REQUEST[:2], *REQUEST[3:]],
        [(name, "" if name == ":path" else value) for name, value in REQUEST],
        [(name, "/a\nb" if name == ":path" else value) for name, value in REQUEST],
        [(":unknown", "x"), *REQUEST],
        [*REQUEST, ("transfer-encoding", "chunked")],
        [*REQUEST, ("", "empty name")],
        [*REQUEST, ("a b", "space in a name")],
    ],
)
def test_a_malformed_request_resets_its_stream_only(peer: Peer, headers: Any) -> None:
    peer.send(peer.headers(1, headers))
    assert peer.reset_code(1) == ErrorCode.PROTOCOL_ERROR
    peer.sync()


def test_data_after_the_end_of_a_stream_resets_it(peer: Peer) -> None:
    peer.send(peer.headers(1, KEEP), frame(DATA, frames.END_STREAM, 1), frame(DATA, 0, 1, b"more"))
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
    peer.send(peer.headers(1, KEEP), peer.headers(1, [("x", "y")]))
    assert peer.reset_code(1) == ErrorCode.PROTOCOL_ERROR


def test_more_streams_than_allowed_are_refused(peer: Peer) -> None:
    peer.send(*(peer.headers(number, KEEP) for number in range(1, 19, 2)))
    assert peer.reset_code(17) == ErrorCode.REFUSED_STREAM
    peer.send(frames.rst_stream(1, ErrorCode.CANCEL), peer.headers(19))
    peer.send(frame(DATA, frames.END_STREAM, 19, message(b"x")))
    assert peer.body(19, 6) == message(b"x")


def test_a_goaway_of_the_client_leaves_its_calls(peer: Peer) -> None:
    peer.send(peer.headers(1), frames.goaway(0, ErrorCode.NO_ERROR, b"x" * 100_000))
    peer.send(frame(DATA, frames.END_STREAM, 1, message(b"still")))
    assert peer.body(1, 10) == message(b"still")
