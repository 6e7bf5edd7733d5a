"""Tests of a server's sockets, TLS, closing and statistics."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from atoll.grpc import GrpcServer
from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ErrorCode
from tests.grpc.http2.http2_peer import DEADLINE_SECONDS, Peer, frame, message, request, served
from tests.grpc.service import UNLIMITED, Service, unary
from tests.grpc.serving import Serving, echo


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


def test_a_connection_beyond_the_limit_is_closed_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with Serving({"/test.Test/Echo": echo}, path, max_connections=2), Peer(path) as first, Peer(path) as second:
        first.sync()
        second.sync()
        with Peer(path) as third:
            assert third.read() is None
        first.sync()


def test_a_connection_accepted_while_the_server_closes_is_closed() -> None:
    async def run() -> None:
        server = GrpcServer({"/test.Test/Echo": echo})
        await server.close()
        ours, theirs = socket.socketpair()
        with theirs:
            await asyncio.get_running_loop().connect_accepted_socket(server._connection, ours)
            await asyncio.sleep(0)
            theirs.settimeout(DEADLINE_SECONDS)
            assert theirs.recv(1) == b""
        assert server.statistics().connections == 0

    asyncio.run(run())


def test_a_unix_socket_that_cannot_be_bound_leaves_no_descriptor(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(OSError, match="No such file"):
            await GrpcServer({}).listen_unix(str(tmp_path / "missing" / "s"))

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(run())
    assert len(os.listdir("/proc/self/fd")) == before
