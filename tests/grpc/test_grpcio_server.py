"""Tests of the tests' raw client with the gRPC library's server, which accepts its HTTP/2 and gRPC."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from atoll.grpc import StatusCode
from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ErrorCode, Setting
from tests.grpc.http2.http2_peer import DEADLINE_SECONDS, REQUEST, Peer, frame, message, request, served


def echo(requests: Iterable[bytes], context: Any) -> Iterator[bytes]:
    yield from requests


def metadata(content: bytes, context: Any) -> bytes:
    context.send_initial_metadata([(key, value) for key, value in context.invocation_metadata() if key == "raw-bin"])
    return b""


def status(content: bytes, context: Any) -> bytes:
    context.abort(grpc.StatusCode.NOT_FOUND, content.decode())
    raise AssertionError("abort raises")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("grpcio") / "s")
    handlers = {
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
        "Metadata": grpc.unary_unary_rpc_method_handler(metadata),
        "Status": grpc.unary_unary_rpc_method_handler(status),
    }
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Test", handlers)])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    yield path
    server.stop(None).wait(DEADLINE_SECONDS)


@pytest.fixture
def peer(path: str) -> Iterator[Peer]:
    with Peer(path) as peer:
        yield peer


def data(stream: int, content: bytes, flags: int = frames.END_STREAM) -> bytes:
    return frame(frames.DATA, flags, stream, content)


def test_a_call_is_answered(path: str) -> None:
    assert served(path)


def test_a_stream_is_answered_message_by_message(peer: Peer) -> None:
    peer.send(peer.headers(1))
    for number in range(20):
        peer.send(data(1, message(b"%d" % number), 0))
        assert peer.body(1, len(message(b"%d" % number))) == message(b"%d" % number)
    peer.send(data(1, b""))
    assert peer.trailers(1)["grpc-status"] == "0"


def test_streams_run_side_by_side(peer: Peer) -> None:
    numbers = range(1, 9, 2)
    peer.send(*(peer.headers(number) for number in numbers))
    peer.send(*(data(number, message(b"x" * number)) for number in numbers))
    bodies = {number: b"" for number in numbers}
    while any(len(body) < number + 5 for number, body in bodies.items()):
        _, _, number, payload = peer.read_until(frames.DATA)
        bodies[number] += payload
    assert bodies == {number: message(b"x" * number) for number in numbers}


def test_priority_and_continuations_are_as_the_server_expects(peer: Peer) -> None:
    block = peer.encoder.encode(REQUEST)  # without padding, which the library's server rejects
    peer.send(
        frame(frames.HEADERS, frames.PRIORITY_FLAG, 1, b"\0\0\0\0\1" + block[:5]),
        frame(frames.CONTINUATION, 0, 1, block[5:9]),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[9:]),
        data(1, message(b"content")),
    )
    assert peer.body(1, 12) == message(b"content")
    assert peer.trailers(1)["grpc-status"] == "0"


def test_a_large_message_comes_back_within_the_windows(peer: Peer) -> None:
    content = message(bytes(60_000))
    peer.send(frames.settings_frame([(Setting.INITIAL_WINDOW_SIZE, 2**31 - 1)]), frames.window_update(0, 1 << 30))
    peer.send(peer.headers(1))
    for start in range(0, len(content), 16_000):
        peer.send(data(1, content[start : start + 16_000], 0))
    peer.send(data(1, b""))
    assert peer.body(1, len(content)) == content


def test_binary_metadata_is_echoed(peer: Peer) -> None:
    peer.send(peer.headers(1, request("/test.Test/Metadata", ("raw-bin", "AAEC/w"))), data(1, message(b"")))
    _, _, _, block = peer.read_until(frames.HEADERS, 1)
    assert dict(peer.decoder.decode(block))["raw-bin"].rstrip("=") == "AAEC/w"


@pytest.mark.parametrize(
    ("path_", "code"),
    [("/test.Test/Status", StatusCode.NOT_FOUND), ("/test.Test/Nothing", StatusCode.UNIMPLEMENTED)],
)
def test_a_status_is_read(peer: Peer, path_: str, code: StatusCode) -> None:
    peer.send(peer.headers(1, request(path_)), data(1, message(b"no such thing")))
    assert int(peer.trailers(1)["grpc-status"]) == code


def test_a_ping_is_answered(peer: Peer) -> None:
    peer.sync()


def test_a_reset_call_leaves_the_connection(peer: Peer) -> None:
    peer.send(peer.headers(1), data(1, message(b"x"), 0))
    peer.body(1, 6)
    peer.send(frames.rst_stream(1, ErrorCode.CANCEL), peer.headers(3), data(3, message(b"y")))
    assert peer.body(3, 6) == message(b"y")


@pytest.mark.parametrize("bad", [frame(frames.PING, 0, 0, b"1234567"), frame(frames.SETTINGS, 0, 0, b"12345")])
def test_a_fault_ends_the_connection(peer: Peer, bad: bytes) -> None:
    peer.send(bad)
    while peer.read() is not None:
        pass
