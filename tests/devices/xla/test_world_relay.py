"""Tests of the relay between XLA's client and the coordination service of a world."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.devices.xla.world_relay import WorldRelay
from atoll.grpc.http2.frames import PREFACE, SETTINGS_ACK

SECONDS = 30.0


class Service:
    """Service with methods that answer at once, and methods that wait."""

    def __init__(self, directory: Path) -> None:
        self.waits = threading.Semaphore(0)  # counts waiting requests
        self.ends = threading.Event()
        self.server = grpc.server(ThreadPoolExecutor(8))
        methods = {name: grpc.unary_unary_rpc_method_handler(self.wait) for name in ("GetKeyValue", "PollForError")}
        methods["InsertKeyValue"] = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("xla.Service", methods),))
        self.address = f"unix:{directory}/service"
        self.server.add_insecure_port(self.address)
        self.server.start()

    def wait(self, request: bytes, _: Any) -> bytes:
        self.waits.release()
        self.ends.wait(SECONDS)
        return request

    def close(self) -> None:
        self.ends.set()
        self.server.stop(None).wait()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.close()


@pytest.fixture
def relay(service: Service) -> Iterator[WorldRelay]:
    relay = WorldRelay(service.address, SECONDS)
    yield relay
    relay.close()


@pytest.fixture
def channel(relay: WorldRelay) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(relay.address) as channel:
        yield channel


def ask(channel: grpc.Channel, method: str, request: bytes = b"") -> Any:
    return channel.unary_unary(f"/xla.Service/{method}").future(request, timeout=SECONDS)


def test_requests_and_answers_pass(channel: grpc.Channel) -> None:
    large = bytes(1_000_000)  # several frames
    assert [ask(channel, "InsertKeyValue", each).result() for each in (b"", b"one", large)] == [b"", b"one", large]


def test_requests_that_wait_fail_when_the_relay_is_closed(
    service: Service, relay: WorldRelay, channel: grpc.Channel
) -> None:
    polls, *waiting = (ask(channel, method) for method in ("PollForError", "GetKeyValue", "GetKeyValue"))
    for _ in range(3):
        assert service.waits.acquire(timeout=SECONDS)
    relay.close()
    assert [each.exception().code() for each in waiting] == [grpc.StatusCode.CANCELLED] * 2
    assert ask(channel, "InsertKeyValue").exception().code() is grpc.StatusCode.CANCELLED
    assert not polls.done(), "XLA ends the process when this request fails"
    polls.cancel()


def test_requests_that_wait_for_long_are_reset_while_others_are_answered(
    service: Service, relay: WorldRelay, channel: grpc.Channel
) -> None:
    waiting = ask(channel, "GetKeyValue")
    assert service.waits.acquire(timeout=SECONDS)
    relay.reset_late(SECONDS)
    assert relay.has_requests
    assert not waiting.done()
    relay.reset_late(0)
    assert waiting.exception().code() is grpc.StatusCode.CANCELLED
    assert not relay.has_requests
    assert ask(channel, "InsertKeyValue", b"one").result() == b"one"


def test_the_clients_connection_remains_when_that_of_the_service_ends(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(f"{tmp_path}/service")
        listener.listen()
        relay = WorldRelay(f"unix:{tmp_path}/service", SECONDS)
        client.connect("\0" + relay.address.removeprefix("unix-abstract:"))
        client.sendall(PREFACE + SETTINGS_ACK)
        service, _ = listener.accept()
        with service, service.makefile("rb") as received:
            assert received.read(len(PREFACE + SETTINGS_ACK)) == PREFACE + SETTINGS_ACK
        client.sendall(SETTINGS_ACK)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        relay.close()
