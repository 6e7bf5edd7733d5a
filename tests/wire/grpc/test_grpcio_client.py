"""The gRPC library's own client against our server."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import grpc
import pytest

from tests.wire.grpc.service import Service, error_of, unary
from tests.wire.grpc.serving import Serving
from tests.wire.http2.http2_peer import DEADLINE_SECONDS


@pytest.mark.parametrize("size", [0, 1, 100, 16_384, 65_536, 65_537, 262_144, 1 << 20, 3 << 20])
def test_a_unary_call_is_answered(channel: grpc.Channel, size: int) -> None:
    content = os.urandom(size)
    assert unary(channel, "Echo", content) == content


def test_a_client_stream_is_answered_at_its_end(channel: grpc.Channel) -> None:
    call = channel.stream_unary("/test.Test/count")
    assert call(iter([bytes(size) for size in range(500)]), timeout=DEADLINE_SECONDS) == b"500 124750"


def test_a_server_stream_arrives_whole(channel: grpc.Channel) -> None:
    sizes = [len(each) for each in channel.unary_stream("/test.Test/stream")(b"", timeout=DEADLINE_SECONDS)]
    assert sizes == [1 << 20] * 64


def test_a_bidirectional_stream_keeps_its_order(channel: grpc.Channel) -> None:
    contents = [bytes([number % 256]) * (number * 37 % 2000) for number in range(2000)]
    assert list(channel.stream_stream("/test.Test/Echo")(iter(contents), timeout=DEADLINE_SECONDS)) == contents


def test_a_bidirectional_stream_answers_before_it_ends(channel: grpc.Channel) -> None:
    go_on = threading.Event()

    def contents() -> Iterator[bytes]:
        yield b"first"
        go_on.wait(DEADLINE_SECONDS)
        yield b"second"

    answers = channel.stream_stream("/test.Test/Echo")(contents(), timeout=DEADLINE_SECONDS)
    assert next(answers) == b"first"
    go_on.set()
    assert list(answers) == [b"second"]


def test_64_mib_go_up_in_one_message(channel: grpc.Channel) -> None:
    assert unary(channel, "count", bytes(64 << 20)) == b"1 67108864"


def test_64_mib_go_up_in_many_messages(channel: grpc.Channel) -> None:
    call = channel.stream_unary("/test.Test/count")
    assert call(iter([bytes(1 << 20)] * 64), timeout=DEADLINE_SECONDS) == b"64 67108864"


def test_a_message_of_buffers_arrives_as_one(channel: grpc.Channel) -> None:
    expected = b"".join(bytes([number]) * (1 << 20) for number in range(64))
    assert unary(channel, "pieces", b"64 1048576") == expected
    assert unary(channel, "pieces", b"300 7") == b"".join(bytes([number % 256]) * 7 for number in range(300))
    assert unary(channel, "pieces", b"3 0") == b""


def test_small_messages_pass_a_large_one(server: Serving, channel: grpc.Channel) -> None:
    large = channel.unary_unary("/test.Test/pieces").future(b"64 1048576", timeout=DEADLINE_SECONDS)
    for _ in range(20):
        assert unary(channel, "Echo", b"small") == b"small"
    assert len(large.result()) == 64 << 20


def test_a_paused_call_gets_its_messages_one_by_one_in_order(channel: grpc.Channel) -> None:
    contents = [bytes([number % 256]) * (number * 997 % 200_000) for number in range(200)]
    assert list(channel.stream_stream("/test.Test/slow")(iter(contents), timeout=DEADLINE_SECONDS)) == contents


def test_an_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    error = error_of(channel, "Nothing")
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "/test.Test/Nothing" in error.details()


@pytest.mark.parametrize("text", ["plain", "100% of ümläuts, 日本語\nand a second line", ""])
def test_a_status_arrives_with_its_text(channel: grpc.Channel, text: str) -> None:
    error = error_of(channel, "status", text.encode())
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, text)


def test_a_status_text_too_long_for_the_client_is_cut(channel: grpc.Channel) -> None:
    error = error_of(channel, "status", "日本語".encode() * 10_000)
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert error.details().startswith("日本語日本語")


def test_metadata_goes_both_ways_text_and_binary(channel: grpc.Channel) -> None:
    raw = bytes(range(256))
    sent = (("text", "some text"), ("raw-bin", raw))
    stream = channel.unary_stream("/test.Test/metadata")(b"", metadata=sent, timeout=DEADLINE_SECONDS)
    received = dict(stream.initial_metadata())
    assert received["text"] == "some text"
    assert received["raw-bin"] == raw
    assert list(stream) == []


def test_a_handler_that_raises_ends_its_call_only(channel: grpc.Channel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL, "atoll.wire.grpc.call"):
        for method in ("raises", "raises_later"):
            assert error_of(channel, method, b"x").code() == grpc.StatusCode.INTERNAL
    assert unary(channel, "Echo", b"still") == b"still"


def test_a_cancelled_call_is_reported(channel: grpc.Channel, service: Service) -> None:
    call = channel.unary_stream("/test.Test/keep")(b"", timeout=DEADLINE_SECONDS)
    assert dict(call.initial_metadata())["state"] == "kept"
    call.cancel()
    assert service.closed.wait(DEADLINE_SECONDS)
    assert service.calls[-1].ended


def test_a_deadline_that_passes_is_reported_as_a_cancellation(channel: grpc.Channel, service: Service) -> None:
    call = channel.unary_unary("/test.Test/keep").future(b"", timeout=0.2)
    assert call.exception().code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert service.closed.wait(DEADLINE_SECONDS)
