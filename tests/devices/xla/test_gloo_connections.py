"""Tests of how connections of collectives are closed, using sockets and an epoll descriptor like gloo's."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from atoll.devices.xla.gloo_connections import GlooConnections

SECONDS = 30.0


class Gloo:
    """Descriptors like those of gloo's thread, with a listening socket and a pipe."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.epoll.register(self.listener, select.EPOLLIN)
        self.connections = GlooConnections([self.epoll.fileno()])
        self.sockets: list[socket.socket] = []

    def connect(self, events: int = select.EPOLLIN) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a new connection. The first end is in gloo's epoll set."""
        there = socket.create_connection(self.listener.getsockname())
        here, _ = self.listener.accept()
        self.epoll.register(here, events)
        self.sockets += [here, there]
        return here, there

    def close(self) -> None:
        self.connections.release()
        self.epoll.close()
        for each in (self.listener, *self.sockets):
            each.close()


@pytest.fixture
def gloo() -> Iterator[Gloo]:
    gloo = Gloo()
    yield gloo
    gloo.close()


def shut_until(gloo: Gloo, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline
        gloo.connections.examine()
        gloo.connections.shut(is_patient=True)
        time.sleep(0.001)


def is_at_end(here: socket.socket) -> bool:
    try:
        return here.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


def test_a_connection_is_closed_for_reading(gloo: Gloo) -> None:
    here, there = gloo.connect()
    shut_until(gloo, lambda: is_at_end(here))
    here.sendall(b"written")
    assert there.recv(100) == b"written"


def test_what_is_not_read_is_read_before_the_end(gloo: Gloo) -> None:
    here, there = gloo.connect()
    there.sendall(b"message")
    while len(here.recv(100, socket.MSG_PEEK)) < len(b"message"):
        pass
    for _ in range(20):
        gloo.connections.examine()
        gloo.connections.shut(is_patient=True)
    there.sendall(b" and more")
    assert here.recv(len(b"message"), socket.MSG_WAITALL) == b"message"
    assert here.recv(len(b" and more"), socket.MSG_WAITALL) == b" and more"
    shut_until(gloo, lambda: is_at_end(here))


def test_a_connection_that_gloo_waits_to_write_to_remains_open(gloo: Gloo) -> None:
    here, _ = gloo.connect(select.EPOLLIN | select.EPOLLOUT)
    other, _ = gloo.connect()
    shut_until(gloo, lambda: is_at_end(other))
    assert not is_at_end(here)
    gloo.connections.shut(is_patient=False)
    assert is_at_end(here)


def test_the_other_host_can_write_after_gloo_has_closed_a_connection(gloo: Gloo) -> None:
    here, there = gloo.connect()
    shut_until(gloo, lambda: is_at_end(here))
    gloo.epoll.unregister(here)
    here.close()
    there.setblocking(False)
    sent = 0

    def sends() -> bool:  # far more than the buffers of a connection hold
        nonlocal sent
        with suppress(BlockingIOError):
            sent += there.send(bytes(1 << 20))
        return sent > 64 << 20

    shut_until(gloo, sends)


@pytest.mark.parametrize(("events", "is_connecting"), [(select.EPOLLIN, False), (select.EPOLLONESHOT, True)])
def test_devices_that_connect_are_noticed(gloo: Gloo, events: int, is_connecting: bool) -> None:
    assert not gloo.connections.examine()
    gloo.connect(events)
    assert gloo.connections.examine(), "a new connection"
    assert gloo.connections.examine() == is_connecting


def test_a_connection_is_not_read_while_it_is_unknown_whether_gloo_reads_it(
    gloo: Gloo, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = gloo.connect(select.EPOLLIN | select.EPOLLOUT)
    gloo.connections.examine()
    there.sendall(b"message")
    while not select.select([here], [], [], SECONDS)[0]:
        pass

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(f"{GlooConnections.__module__}.open", refuse, raising=False)
    assert gloo.connections.examine(), "devices may be connecting"
    gloo.connections.shut(is_patient=True)
    assert here.recv(100, socket.MSG_DONTWAIT) == b"message"
