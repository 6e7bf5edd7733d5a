"""Tests of calls of a raw client, with messages that the gRPC library's client never sends."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest

from atoll.grpc import Limits
from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ErrorCode
from tests.grpc.http2.http2_peer import DEADLINE_SECONDS, REQUEST, Peer, frame, message, request, served
from tests.grpc.service import MAX_MESSAGE, Service
from tests.grpc.serving import Serving, echo


def test_a_paused_call_holds_no_more_than_its_window(server: Serving, peer: Peer, service: Service) -> None:
    peer.send(peer.headers(1, request("/test.Test/keep")))
    peer.sync()
    call = service.calls[-1]
    server.call(call.pause)
    window = Limits().stream_window_bytes
    body = b"".join(message(bytes(91)) for _ in range(window // 96))
    for start in range(0, len(body), 10_000):
        peer.send(frame(frames.DATA, 0, 1, body[start : start + 10_000]))
    assert not [got for got in peer.sync() if got[0] == frames.WINDOW_UPDATE and got[2] == 1]
    assert server.server.statistics().queued_bytes >= len(body)

    seen: list[int] = []
    server.call(call.set_handlers, lambda content: seen.append(len(content)))
    server.call(call.resume)
    assert peer.read_until(frames.WINDOW_UPDATE, 1)
    assert seen == [91] * (window // 96)


def test_a_request_that_ends_while_paused_is_half_closed_after_its_messages(
    server: Serving, peer: Peer, service: Service
) -> None:
    peer.send(peer.headers(1, request("/test.Test/keep")))
    peer.sync()
    call, seen = service.calls[-1], []

    def arrange() -> None:
        call.pause()
        call.set_handlers(seen.append, lambda: (seen.append("end"), call.finish())[1])

    server.call(arrange)
    peer.send(frame(frames.DATA, frames.END_STREAM, 1, message(b"a") + message(b"b")))
    peer.sync()
    assert seen == []
    server.call(call.resume)
    peer.trailers(1)
    assert seen == [b"a", b"b", "end"]


@pytest.mark.parametrize("padded", [True, False])
def test_binary_metadata_may_be_padded_or_not(server: Serving, peer: Peer, service: Service, padded: bool) -> None:
    encoded = base64.b64encode(b"abcd").decode()
    value = encoded if padded else encoded.rstrip("=")
    peer.send(peer.headers(1, request("/test.Test/keep", ("raw-bin", value), ("a", "1"), ("a", "2"))))
    peer.sync()
    metadata = service.calls[-1].metadata
    assert metadata["raw-bin"] == b"abcd"
    assert metadata["a"] == b"1,2"


def test_binary_metadata_that_is_no_base64_is_an_invalid_argument(peer: Peer) -> None:
    peer.send(peer.headers(1, request("/test.Test/Echo", ("raw-bin", "!!"))))
    trailers = peer.trailers(1)
    assert trailers["grpc-status"] == "3"
    assert "raw-bin" in trailers["grpc-message"]


@pytest.mark.parametrize(("name", "value", "status"), [(":method", "GET", "405"), ("content-type", "text/html", "415")])
def test_a_request_that_is_not_grpc_gets_an_http_status(peer: Peer, name: str, value: str, status: str) -> None:
    peer.send(peer.headers(1, [(key, value if key == name else old) for key, old in REQUEST]))
    assert peer.trailers(1)[":status"] == status


def test_a_compressed_message_is_unimplemented(peer: Peer) -> None:
    peer.send(peer.headers(1), frame(frames.DATA, 0, 1, b"\1\0\0\0\1x"))
    assert peer.trailers(1)["grpc-status"] == "12"


@pytest.mark.parametrize("cut", [3, 5, 60_000])
def test_a_message_above_the_limit_is_refused_before_it_comes(peer: Peer, cut: int) -> None:
    announced = (MAX_MESSAGE + 1).to_bytes(5, "big") + bytes(60_000)
    peer.send(peer.headers(1), frame(frames.DATA, 0, 1, announced[:cut]), frame(frames.DATA, 0, 1, announced[cut:]))
    trailers = peer.trailers(1)
    assert trailers["grpc-status"] == "8"
    assert str(MAX_MESSAGE) in trailers["grpc-message"]


def test_a_huge_message_that_never_comes_costs_no_memory(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    path = str(tmp_path / "s")
    with Serving({"/test.Test/Echo": echo}, path), Peer(path) as peer:
        before = resident()
        for number in range(1, 21, 2):
            peer.send(peer.headers(number), frame(frames.DATA, 0, number, (1 << 30).to_bytes(5, "big") + b"x"))
        peer.sync()
        assert resident() - before < 100 << 20


@pytest.mark.parametrize("body", [b"\0\0", b"\0\0\0\0\5abc"])
def test_a_request_that_ends_inside_a_message_is_an_error(peer: Peer, body: bytes) -> None:
    peer.send(peer.headers(1), frame(frames.DATA, frames.END_STREAM, 1, body))
    assert peer.trailers(1)["grpc-status"] == "13"


@pytest.mark.parametrize("size", [0, 3, 300, 70_000, 2 << 20])
@pytest.mark.parametrize("frame_bytes", [1, 4, 6, 1000, 65_536])
def test_messages_may_be_cut_into_frames_anywhere(peer: Peer, size: int, frame_bytes: int) -> None:
    body = message(b"x" * size) + message(b"end")
    if len(body) > 2000 * frame_bytes:
        body = message(b"x" * (500 * frame_bytes)) + message(b"end")
    peer.send(frames.settings_frame([(4, 2**31 - 1)]), frames.window_update(0, 1 << 30), peer.headers(1))
    for start in range(0, len(body), frame_bytes):
        peer.send(frame(frames.DATA, 0, 1, body[start : start + frame_bytes]))
    assert peer.body(1, len(body)) == body


def test_a_lost_connection_closes_its_calls(server: Serving, service: Service) -> None:
    with Peer(server.path) as peer:
        peer.send(peer.headers(1, request("/test.Test/keep")))
        peer.read_until(frames.HEADERS, 1)
        assert not service.closed.is_set()
    assert service.closed.wait(DEADLINE_SECONDS)
    assert service.calls[-1].ended


def test_on_closed_is_not_called_after_finish(server: Serving, peer: Peer, service: Service) -> None:
    peer.send(peer.headers(1, request("/test.Test/keep")))
    peer.sync()
    server.call(service.calls[-1].finish)
    assert peer.trailers(1)["grpc-status"] == "0"
    peer.send(frames.rst_stream(1, ErrorCode.CANCEL))
    peer.sync()
    assert not service.closed.is_set()


def test_an_ended_call_ignores_what_is_sent(server: Serving, peer: Peer, service: Service) -> None:
    peer.send(peer.headers(1, request("/test.Test/keep")), frames.rst_stream(1, ErrorCode.CANCEL))
    peer.sync()
    call = service.calls[-1]
    for action in (lambda: call.send(b"late"), call.finish, call.pause, call.resume):
        server.call(action)
    assert call.unsent_bytes == 0
    assert not [got for got in peer.sync() if got[0] in (frames.DATA, frames.HEADERS)]


def test_a_client_that_still_uploads_is_stopped_when_the_call_ends(peer: Peer) -> None:
    peer.send(peer.headers(1, request("/test.Test/status")), frame(frames.DATA, 0, 1, message(b"no")))
    assert peer.trailers(1)["grpc-status"] == "5"
    assert peer.reset_code(1) == ErrorCode.NO_ERROR


def test_drained_returns_when_the_call_is_cancelled(server: Serving, peer: Peer, service: Service) -> None:
    peer.send(peer.headers(1, request("/test.Test/keep")))
    peer.sync()
    call = service.calls[-1]

    async def fill() -> None:
        call.send(bytes(1 << 20))
        waiting = asyncio.ensure_future(call.drained())
        await asyncio.sleep(0)
        assert not waiting.done()
        peer.send(frames.rst_stream(1, ErrorCode.CANCEL))
        await waiting
        assert call.ended

    server.run(fill())


def test_a_reader_that_stops_does_not_fill_the_transport(server: Serving, peer: Peer) -> None:
    peer.send(frames.settings_frame([(4, 2**31 - 1)]), frames.window_update(0, 1 << 30))
    peer.send(peer.headers(1, request("/test.Test/pieces")))
    peer.send(frame(frames.DATA, frames.END_STREAM, 1, message(b"64 1048576")))
    peer.read_until(frames.HEADERS, 1)

    def backlog() -> int:
        (connection,) = [each for each in server.server._connections if 1 in each.streams]
        assert connection._transport is not None
        return connection._transport.get_write_buffer_size()

    assert server.call(backlog) <= 4 << 20
    assert len(peer.body(1, (64 << 20) + 5)) == (64 << 20) + 5


def test_a_callback_that_raises_closes_its_call(peer: Peer, service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL, "atoll.grpc.call"):
        peer.send(peer.headers(1, request("/test.Test/raises_later")), frame(frames.DATA, 0, 1, message(b"x")))
        assert peer.trailers(1)["grpc-status"] == "13"
    assert service.closed.wait(DEADLINE_SECONDS)


@pytest.mark.parametrize("cancel", [False, True], ids=["completed", "cancelled"])
def test_incomplete_messages_of_a_connection_are_bounded_together(tmp_path: Path, cancel: bool) -> None:
    path, size = str(tmp_path / "s"), 100_000
    prefix, limits = size.to_bytes(5, "big"), Limits(incomplete_bytes=2 * size)
    with (
        Serving({"/test.Test/Echo": echo}, path, limits=limits) as serving,
        Peer(path) as peer,
    ):
        for number in (1, 3, 5):
            peer.send(peer.headers(number), frame(frames.DATA, 0, number, prefix + b"x"))
        trailers = peer.trailers(5)
        assert trailers["grpc-status"] == "8"
        assert "incomplete" in trailers["grpc-message"]
        assert serving.call(serving.server.statistics).incomplete_bytes == 2 * size
        assert served(path), "another connection has a separate limit"
        if cancel:
            peer.send(frames.rst_stream(1, ErrorCode.CANCEL))
        else:
            peer.send(frame(frames.DATA, frames.END_STREAM, 1, bytes(size - 1)))
        peer.send(peer.headers(7), frame(frames.DATA, 0, 7, prefix + b"x"))
        peer.sync()
        assert serving.call(serving.server.statistics).incomplete_bytes == 2 * size
        peer.send(frame(frames.DATA, frames.END_STREAM, 7, bytes(size - 1)))
        peer.send(frames.rst_stream(3, ErrorCode.CANCEL))
        peer.sync()
        assert serving.call(serving.server.statistics).incomplete_bytes == 0


def test_a_callback_that_raises_on_a_large_message_ends_its_call(
    peer: Peer, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL, "atoll.grpc.call"):
        peer.send(peer.headers(1, request("/test.Test/raises_later")))
        peer.send(frame(frames.DATA, 0, 1, message(bytes(500_000))[:60_000]))
        peer.sync()
        peer.send(frame(frames.DATA, 0, 1, bytes(440_005)))
        assert peer.trailers(1)["grpc-status"] == "13"


def raising(*arguments: object) -> None:
    raise RuntimeError("callback broke")


def test_an_on_closed_that_raises_is_logged(
    server: Serving, peer: Peer, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    for number, code in ((1, None), (3, "13")):
        peer.send(peer.headers(number, request("/test.Test/keep")))
        peer.sync()
        service.calls[-1].set_handlers(raising, on_closed=raising)
        if code is None:
            peer.send(frames.rst_stream(number, ErrorCode.CANCEL))
            peer.sync()
        else:
            peer.send(frame(frames.DATA, 0, number, message(b"x")))
            assert peer.reset_code(number) == ErrorCode.NO_ERROR
    assert [record.message for record in caplog.records].count("on_closed of /test.Test/keep raised") == 2


def test_a_callback_that_raises_after_finish_changes_nothing(
    server: Serving, peer: Peer, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    peer.send(peer.headers(1, request("/test.Test/keep")))
    peer.sync()
    call = service.calls[-1]

    def on_message(content: object) -> None:
        call.finish()
        raise RuntimeError("too late")

    call.set_handlers(on_message, on_closed=service.closed.set)
    peer.send(frame(frames.DATA, 0, 1, message(b"x")))
    assert peer.trailers(1)["grpc-status"] == "0"
    assert not service.closed.is_set()
    assert any("after the call had ended" in record.message for record in caplog.records)


def test_initial_metadata_is_sent_once(server: Serving, peer: Peer, service: Service) -> None:
    peer.send(peer.headers(1, request("/test.Test/keep")))
    peer.sync()
    call = service.calls[-1]
    with pytest.raises(RuntimeError, match="sent already"):
        server.call(call.send_initial_metadata)
    server.call(call.finish)
    server.call(call.send_initial_metadata)
    assert peer.trailers(1)["grpc-status"] == "0"


def test_drained_returns_at_once_when_little_is_unsent(server: Serving, peer: Peer, service: Service) -> None:
    peer.send(peer.headers(1, request("/test.Test/keep")))
    peer.sync()
    server.run(service.calls[-1].drained())


def test_an_array_is_sent_as_its_bytes(server: Serving, peer: Peer, service: Service) -> None:
    peer.send(peer.headers(1, request("/test.Test/keep")))
    peer.sync()
    words = memoryview(bytes(range(16))).cast("I")
    server.call(service.calls[-1].send, words)
    server.call(service.calls[-1].send, (b"head", words))
    assert peer.body(1, 21 + 25) == message(bytes(range(16))) + message(b"head" + bytes(range(16)))


def test_callbacks_of_an_ended_call_are_not_kept(server: Serving, peer: Peer, service: Service) -> None:
    peer.send(peer.headers(1, request("/test.Test/keep")), frames.rst_stream(1, ErrorCode.CANCEL))
    peer.sync()
    call = service.calls[-1]
    held = Mock()
    left = weakref.ref(held)
    call.set_handlers(held, held, held)
    del held
    assert left() is None
