"""The gRPC server against the gRPC library's own client, and a raw one for what that client never sends."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import socket
import ssl
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from atoll.wire.grpc import Call, GrpcServer, Limits, StatusCode
from atoll.wire.http2 import frames
from atoll.wire.http2.frames import ErrorCode
from tests.wire.http2.http2_peer import DEADLINE_SECONDS, REQUEST, Peer, Serving, echo, frame, message, served

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
MAX_MESSAGE = 100 << 20


class Service:
    """Handlers, and what they saw."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.calls: list[Call] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def keep(self, call: Call) -> None:
        self.closed.clear()
        self.calls.append(call)
        call.on_closed = self.closed.set
        call.send_initial_metadata({"state": b"kept"})

    def count(self, call: Call) -> None:
        """Answers with the number and the sum of the sizes of the messages."""
        sizes: list[int] = []
        call.on_message = lambda content: sizes.append(len(content))
        call.on_half_close = lambda: (call.send(b"%d %d" % (len(sizes), sum(sizes))), call.finish())[1]

    def pieces(self, call: Call) -> None:
        """Answers a message of pieces: as many buffers, and as long, as the request tells."""

        def answer(content: Any) -> None:
            count, size = map(int, bytes(content).split())
            call.send([memoryview(bytes([number % 256]) * size) for number in range(count)])
            call.finish()

        call.on_message = answer

    def stream(self, call: Call) -> None:
        """Sends 64 messages of 1 MiB, never more than the low-water mark and one of them at once."""

        async def send() -> None:
            content = memoryview(bytes(1 << 20))
            for _ in range(64):
                call.send(content)
                assert call.unsent_bytes <= (1 << 20) + (256 << 10) + 10
                await call.drained()
            call.finish()

        task = asyncio.get_running_loop().create_task(send())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def slow(self, call: Call) -> None:
        """Takes one message a turn of the loop, and echoes it."""
        loop = asyncio.get_running_loop()

        def take(content: Any) -> None:
            call.send(bytes(content))
            call.pause()
            loop.call_soon(call.resume)

        call.on_message = take
        call.on_half_close = lambda: call.finish()

    def metadata(self, call: Call) -> None:
        call.send_initial_metadata({"text": call.metadata["text"], "raw-bin": call.metadata["raw-bin"]})
        call.finish()

    def status(self, call: Call) -> None:
        call.on_message = lambda content: call.finish(StatusCode.NOT_FOUND, bytes(content).decode())

    def raises(self, call: Call) -> None:
        raise RuntimeError("handler broke")

    def raises_later(self, call: Call) -> None:
        def on_message(content: Any) -> None:
            raise RuntimeError("callback broke")

        call.on_message = on_message

    def methods(self) -> dict[str, Callable[[Call], None]]:
        names = ("keep", "count", "pieces", "stream", "slow", "metadata", "status", "raises", "raises_later")
        return {"/test.Test/Echo": echo} | {f"/test.Test/{name}": getattr(self, name) for name in names}


@pytest.fixture(scope="module")
def service() -> Service:
    return Service()


@pytest.fixture(scope="module", params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def server(request: Any, tmp_path_factory: pytest.TempPathFactory, service: Service) -> Iterator[Serving]:
    path = str(tmp_path_factory.mktemp("grpc") / "s")
    with Serving(service.methods(), path, request.param, max_message_bytes=MAX_MESSAGE) as serving:
        yield serving
        assert served(path)


@pytest.fixture(scope="module")
def channel(server: Serving) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address, options=UNLIMITED) as channel:
        yield channel


@pytest.fixture
def peer(server: Serving) -> Iterator[Peer]:
    with Peer(server.path) as peer:
        yield peer


def unary(channel: grpc.Channel, method: str, content: bytes = b"", **options: Any) -> Any:
    return channel.unary_unary(f"/test.Test/{method}")(content, timeout=DEADLINE_SECONDS, **options)


def error_of(channel: grpc.Channel, method: str, content: bytes = b"", **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        unary(channel, method, content, **options)
    return caught.value


def request(path: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [(name, path if name == ":path" else value) for name, value in REQUEST] + list(more)


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
    server.call(setattr, call, "on_message", lambda content: seen.append(len(content)))
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
        call.on_message = seen.append
        call.on_half_close = lambda: (seen.append("end"), call.finish())[1]

    server.call(arrange)
    peer.send(frame(frames.DATA, frames.END_STREAM, 1, message(b"a") + message(b"b")))
    peer.sync()
    assert seen == []
    server.call(call.resume)
    peer.trailers(1)
    assert seen == [b"a", b"b", "end"]


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


@pytest.mark.parametrize("cut", [3, 5, 70_000])
def test_a_message_above_the_limit_is_refused_before_it_comes(peer: Peer, cut: int) -> None:
    announced = (MAX_MESSAGE + 1).to_bytes(5, "big") + bytes(70_000)
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


def test_a_client_still_uploading_is_told_to_stop_when_the_call_ends(peer: Peer) -> None:
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


def test_calls_over_tcp_are_answered(service: Service, tmp_path: Path) -> None:
    with Serving(service.methods(), str(tmp_path / "s")) as serving:
        port = serving.run(serving.server.listen_tcp("127.0.0.1", 0))
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED) as channel:
            assert unary(channel, "Echo", b"content") == b"content"
            assert unary(channel, "count", bytes(8 << 20)) == b"1 8388608"


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_calls_over_tls_are_answered(service: Service, tmp_path: Path, loop_factory: Any) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*new, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Serving(service.methods(), str(tmp_path / "s"), loop_factory) as serving:
        port = serving.run(serving.server.listen_tcp("127.0.0.1", 0, context))
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"localhost:{port}", credentials, options=UNLIMITED) as channel:
            assert unary(channel, "Echo", b"content") == b"content"
            assert unary(channel, "Echo", bytes(8 << 20)) == bytes(8 << 20)


def test_a_unix_socket_has_mode_0600(server: Serving) -> None:
    assert stat.S_IMODE(os.stat(server.path).st_mode) == 0o600


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    with Serving({"/test.Test/Echo": echo}, path):
        assert served(path)


def test_a_socket_that_is_in_use_is_left_alone(server: Serving) -> None:
    with pytest.raises(OSError, match="listens"):
        server.run(GrpcServer({}).listen_unix(server.path))
    assert served(server.path)


def test_a_file_that_is_no_socket_is_left_alone(server: Serving, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        server.run(GrpcServer({}).listen_unix(str(path)))
    assert path.read_text() == "precious"


def test_close_removes_the_socket_file_and_ends_the_calls(tmp_path: Path, service: Service) -> None:
    path = str(tmp_path / "s")
    with Serving(service.methods(), path):
        peer = Peer(path)
        peer.send(peer.headers(1, request("/test.Test/keep")))
        peer.read_until(frames.HEADERS, 1)
    with peer:
        assert service.closed.is_set()
        assert peer.goaway_code() == ErrorCode.NO_ERROR
    assert not os.path.exists(path)


def test_statistics_count_calls_messages_and_bytes(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with Serving({"/test.Test/Echo": echo}, path) as serving, Peer(path) as peer:
        peer.send(peer.headers(1), frame(frames.DATA, 0, 1, message(b"a") + message(b"b")))
        peer.body(1, 12)
        now = serving.call(serving.server.statistics)
        assert (now.connections, now.calls, now.calls_open) == (1, 1, 1)
        assert (now.messages_in, now.messages_out, now.queued_bytes) == (2, 2, 0)
        assert now.bytes_in > 12
        assert now.bytes_out > 12
