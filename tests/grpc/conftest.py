"""Fixtures: a server with all kinds of handlers, on both kinds of event loops, and two clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import uvloop

from tests.grpc.http2.http2_peer import Peer, served
from tests.grpc.service import MAX_MESSAGE, UNLIMITED, Service
from tests.grpc.serving import Serving


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
