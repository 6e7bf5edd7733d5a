"""Tests of the gRPC library's client with Atoll's server."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.grpc.http2.http2_peer import DEADLINE_SECONDS, Peer, served
from tests.grpc.service import Service, error_of, unary
from tests.grpc.serving import Serving


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
    with caplog.at_level(logging.CRITICAL, "atoll.grpc.call"):
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


def test_64_mib_come_back_in_one_message(channel: grpc.Channel) -> None:
    content = bytes(64 << 20)
    assert unary(channel, "Echo", content) == content


def test_more_calls_at_once_than_streams_are_allowed_are_all_answered(channel: grpc.Channel) -> None:
    calls = [
        channel.unary_unary("/test.Test/Echo").future(b"%d" % number, timeout=DEADLINE_SECONDS) for number in range(400)
    ]
    assert [call.result() for call in calls] == [b"%d" % number for number in range(400)]


def test_many_open_streams_interleave(channel: grpc.Channel) -> None:
    go_on = threading.Event()

    def contents(number: int) -> Iterator[bytes]:
        yield b"%d" % number
        go_on.wait(DEADLINE_SECONDS)
        yield b"end"

    streams = [
        channel.stream_stream("/test.Test/Echo")(contents(number), timeout=DEADLINE_SECONDS) for number in range(40)
    ]
    assert [next(stream) for stream in streams] == [b"%d" % number for number in range(40)]
    go_on.set()
    assert [list(stream) for stream in streams] == [[b"end"]] * 40


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_unimplemented(channel: grpc.Channel, algorithm: grpc.Compression) -> None:
    error = error_of(channel, "Echo", bytes(10_000), compression=algorithm)
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "compressed" in error.details()
    assert unary(channel, "Echo", b"plain") == b"plain"


def test_the_client_stops_its_upload_when_the_call_ends_early(channel: grpc.Channel) -> None:
    uploaded = []

    def contents() -> Iterator[bytes]:
        while not uploaded or channel_alive.is_set():
            uploaded.append(1)
            yield b"enough"

    channel_alive = threading.Event()
    channel_alive.set()
    call = channel.stream_unary("/test.Test/status").future(contents(), timeout=DEADLINE_SECONDS)
    assert call.exception().code() == grpc.StatusCode.NOT_FOUND
    channel_alive.clear()


def test_an_iterator_of_responses_that_is_cancelled_closes_the_call(channel: grpc.Channel, service: Service) -> None:
    call = channel.stream_stream("/test.Test/keep")(iter([b"a"]), timeout=DEADLINE_SECONDS)
    assert dict(call.initial_metadata())["state"] == "kept"
    call.cancel()
    assert call.code() == grpc.StatusCode.CANCELLED
    assert service.closed.wait(DEADLINE_SECONDS)


def test_keepalive_pings_are_answered(server: Serving) -> None:
    keepalive = {"time_ms": 100, "timeout_ms": 2000, "permit_without_calls": 1}
    options = [(f"grpc.keepalive_{name}", value) for name, value in keepalive.items()]
    with grpc.insecure_channel(server.address, options=[*options, ("grpc.http2.max_pings_without_data", 0)]) as channel:
        call = channel.unary_stream("/test.Test/keep")(b"", timeout=DEADLINE_SECONDS)
        call.initial_metadata()
        before, pings = server.call(server.server.statistics).bytes_in, 5 * 17
        deadline = time.monotonic() + DEADLINE_SECONDS
        while server.call(server.server.statistics).bytes_in < before + pings and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.call(server.server.statistics).bytes_in >= before + pings
        assert call.is_active()
        call.cancel()


def test_calls_of_a_server_that_closes_are_unavailable_and_the_next_one_is_used(tmp_path: Path) -> None:
    service, path = Service(), str(tmp_path / "s")
    with grpc.insecure_channel(f"unix:{path}") as channel:
        with Serving(service.methods(), path):
            call = channel.unary_stream("/test.Test/keep")(b"", timeout=DEADLINE_SECONDS)
            call.initial_metadata()
        assert call.code() == grpc.StatusCode.UNAVAILABLE
        assert service.calls[-1].ended
        with Serving(service.methods(), path):
            assert unary(channel, "Echo", b"again", wait_for_ready=True) == b"again"


def test_a_client_is_refused_where_there_are_too_many_connections(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with Serving(Service().methods(), path, max_connections=1) as serving:
        with Peer(path) as first:
            first.sync()
            with grpc.insecure_channel(serving.address) as channel, pytest.raises(grpc.RpcError) as caught:
                unary(channel, "Echo", b"x")
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            first.sync()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while serving.call(serving.server.statistics).connections and time.monotonic() < deadline:
            time.sleep(0.01)
        assert served(path)


def test_the_status_that_a_handler_raises_arrives(channel: grpc.Channel) -> None:
    error = error_of(channel, "raises_status", b"x")
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "not today" in error.details()
