"""Fixtures: a server with narrow limits, the calls of its method that never replies, and a raw client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atoll.grpc import Call, Limits
from tests.grpc.http2.http2_peer import WINDOW, Peer, served
from tests.grpc.serving import Serving, echo


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Return the calls of the method that never replies."""
    return []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, calls: list[Call]) -> Iterator[Serving]:
    path = str(tmp_path_factory.mktemp("http2") / "s")
    limits = Limits(
        stream_window_bytes=WINDOW,
        connection_window_bytes=2 * WINDOW,
        max_concurrent_streams=8,
        nuisance_burst=100,
        nuisance_per_second=0.0,
    )
    with Serving({"/test.Test/Echo": echo, "/test.Test/Keep": calls.append}, path, limits=limits) as serving:
        yield serving
        assert served(path)


@pytest.fixture
def peer(server: Serving) -> Iterator[Peer]:
    with Peer(server.path) as peer:
        yield peer
