"""Tests of the resources that a client can use before a handler has admitted it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.grpc import Call
from atoll.grpc.grpc_server import FIRST_CALLS, FIRST_MESSAGE_BYTES
from atoll.grpc.http2 import frames
from atoll.grpc.http2.frames import ErrorCode
from atoll.grpc.status import StatusCode
from atoll.wire.unauthenticated import UnauthenticatedConnections
from tests.grpc.http2.http2_peer import REQUEST, Peer, frame, message, request, served
from tests.grpc.serving import Serving, echo

ADMIT = request("/test.Test/Admit")


def admit(call: Call) -> None:
    call.admit()
    echo(call)


@pytest.fixture
def strangers() -> UnauthenticatedConnections:
    return UnauthenticatedConnections(limit=4, max_per_address=4, seconds=1000.0)


@pytest.fixture
def server(tmp_path: Path, strangers: UnauthenticatedConnections) -> Iterator[Serving]:
    methods = {"/test.Test/Echo": echo, "/test.Test/Admit": admit}
    with Serving(methods, str(tmp_path / "s"), strangers=strangers) as serving:
        yield serving


def data(stream: int, nbytes: int) -> bytes:
    """Return a whole message in frames of the default size."""
    body = message(bytes(nbytes))
    return b"".join(frame(frames.DATA, 0, stream, body[start : start + 16384]) for start in range(0, len(body), 16384))


def test_a_message_is_small_until_the_client_is_admitted(server: Serving) -> None:
    with Peer(server.path) as peer:
        peer.send(peer.headers(1, REQUEST), frame(frames.DATA, 0, 1, message(bytes(FIRST_MESSAGE_BYTES - 5))))
        assert len(peer.body(1, FIRST_MESSAGE_BYTES)) == FIRST_MESSAGE_BYTES
        peer.send(frame(frames.DATA, 0, 1, message(bytes(1 << 30))[:100]))
        assert peer.trailers(1)["grpc-status"] == str(int(StatusCode.RESOURCE_EXHAUSTED))
        assert server.call(server.server.statistics).incomplete_bytes == 0


def test_an_admitted_client_sends_large_messages_in_that_call_and_in_others(server: Serving) -> None:
    with Peer(server.path) as peer:
        peer.send(peer.headers(1, ADMIT), data(1, 60_000))
        assert len(peer.body(1, 60_005)) == 60_005
        peer.send(peer.headers(3, REQUEST), data(3, 1000))
        assert len(peer.body(3, 1005)) == 1005


def test_a_client_that_is_not_admitted_has_few_calls(server: Serving) -> None:
    with Peer(server.path) as peer:
        for number in range(1, 2 * FIRST_CALLS + 3, 2):
            peer.send(peer.headers(number, REQUEST))
        last = 2 * FIRST_CALLS + 1
        assert peer.trailers(last)["grpc-status"] == str(int(StatusCode.RESOURCE_EXHAUSTED))


def test_a_flood_of_connections_leaves_admitted_clients_alone(
    server: Serving, strangers: UnauthenticatedConnections
) -> None:
    with Peer(server.path) as honest:
        honest.send(honest.headers(1, ADMIT), data(1, 10))
        honest.body(1, 15)
        flood = [Peer(server.path) for _ in range(12)]
        assert [each.goaway_code() for each in flood[:8]] == [ErrorCode.ENHANCE_YOUR_CALM] * 8
        honest.send(data(1, 20))
        assert len(honest.body(1, 25)) == 25
        assert served(server.path)
        for each in flood:
            each.socket.close()
    server.call(lambda: None)


def test_a_client_that_is_not_admitted_in_time_is_dropped(tmp_path: Path) -> None:
    strangers = UnauthenticatedConnections(seconds=0.1)
    with Serving({"/test.Test/Echo": echo}, str(tmp_path / "s"), strangers=strangers) as serving:
        with Peer(serving.path) as peer:
            peer.send(peer.headers(1, REQUEST))
            assert peer.goaway_code() == ErrorCode.ENHANCE_YOUR_CALM
        assert serving.call(strangers.statistics).expired == 1
