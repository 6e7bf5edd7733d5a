"""Messages between hosts of a group, over real data ports."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.peers.data_port import DataPort
from atoll.protocol import messages as m
from atoll.transfers.inbox import Inbox
from atoll.wire.address import Address
from atoll.wire.framing import PIECE_BYTES
from atoll.worker import host_links
from atoll.worker.host_links import HostLinks

SECONDS = 20.0


class Host:
    """Data port with its links and the received messages."""

    def __init__(self, number: int, address: Address) -> None:
        self.port = DataPort(
            address,
            Inbox(lambda session, feed: None),
            on_lost=lambda host, lost, why: self.links.lose(host, "the connection broke"),
            on_control=self._take,
        )
        self.is_closed = False
        self.changed = threading.Condition()
        self.came: list[bytes] = []
        self.lost: list[tuple[int, str]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.links = HostLinks(self.port, self._lose)

    def _take(self, content: Any) -> None:
        assert self.goes_on.wait(SECONDS)
        with self.changed:
            self.came.append(bytes(content))
            self.changed.notify_all()

    def _lose(self, host: int, text: str) -> None:
        with self.changed:
            self.lost.append((host, text))
            self.changed.notify_all()

    def until(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, SECONDS), f"{len(self.came)} came, {self.lost} are lost"


@pytest.fixture(params=["unix", "tcp"])
def hosts(request: pytest.FixtureRequest, short_directory: Path) -> Iterator[list[Host]]:
    def address(number: int) -> Address:
        if request.param == "unix":
            return Address(path=str(short_directory / f"{number}"))
        return Address(host="127.0.0.1", port=0)

    hosts = [Host(number, address(number)) for number in range(2)]
    addresses = tuple((number, str(host.port.address)) for number, host in enumerate(hosts))
    for number, host in enumerate(hosts):
        host.port.set_peers(addresses, f"secret {number}", frozenset({"secret 0", "secret 1"}))
    yield hosts
    for host in hosts:
        host.goes_on.set()
        if not host.is_closed:
            host.port.close()


def test_messages_of_all_sizes_arrive_in_order(hosts: list[Host]):
    """A thread sends messages that are too large to be sent at once, and those behind them."""
    sizes = [10, 3_000_000, 20, 100_000, *[30] * 200, 1_000_000, 5]
    sent = [number.to_bytes(4, "little") * (size // 4 + 1) for number, size in enumerate(sizes)]
    for content in sent:
        hosts[0].links.send(1, content)
    hosts[1].until(lambda: len(hosts[1].came) == len(sent))
    assert hosts[1].came == sent
    assert hosts[0].lost == []


def test_a_small_message_overtakes_a_large_one_in_pieces(hosts: list[Host]):
    hosts[0].links.send(1, b"first")
    hosts[1].until(lambda: hosts[1].came)
    hosts[1].goes_on.clear()
    large = bytes(48 << 20)
    hosts[0].links.send(1, b"before")
    hosts[0].links.send(1, large, True)
    time.sleep(0.3)  # until the sockets accept no more
    hosts[0].links.send(1, b"small")
    hosts[1].goes_on.set()
    hosts[1].until(lambda: b"small" in hosts[1].came)
    came = list(hosts[1].came)
    assert came[1] == b"before"
    pieces = [msgspec.msgpack.decode(each, type=m.RelayedPiece) for each in came[2 : came.index(b"small")]]
    assert sum(len(each.content) for each in pieces) < 8 << 20
    hosts[1].until(lambda: len(hosts[1].came) == len(large) // PIECE_BYTES + 3)
    pieces = [msgspec.msgpack.decode(each, type=m.RelayedPiece) for each in hosts[1].came[2:] if each != b"small"]
    assert b"".join(each.content for each in pieces) == large
    assert [each.is_last for each in pieces] == [False] * (len(pieces) - 1) + [True]
    assert hosts[0].lost == []


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_host_that_does_not_read_keeps_nobody_waiting_and_is_lost_at_last(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch, in_pieces: bool
):
    monkeypatch.setattr(host_links, "MAX_UNSENT", 4 << 20)
    hosts[1].goes_on.clear()
    for _ in range(100):
        hosts[0].links.send(1, bytes(1 << 17), in_pieces)
    hosts[0].until(lambda: hosts[0].lost)
    ((host, text),) = hosts[0].lost
    assert host == 1
    assert "does not read" in text


def test_a_host_that_cannot_be_reached_is_lost_once(hosts: list[Host]):
    hosts[1].port.close()
    hosts[1].is_closed = True
    hosts[0].links.send(1, b"first")
    hosts[0].links.send(1, b"second")
    hosts[0].until(lambda: hosts[0].lost)
    hosts[0].links.send(1, b"third")
    assert [host for host, _ in hosts[0].lost] == [1]


def test_a_connection_that_ends_is_a_loss_though_nothing_is_being_sent(hosts: list[Host]):
    """Messages in transit may not have arrived, and nobody would send them again."""
    hosts[0].links.send(1, b"first")
    hosts[1].until(lambda: hosts[1].came)
    peer = hosts[0].port.to_host(1)
    peer._socket._socket.shutdown(socket.SHUT_RDWR)
    hosts[0].until(lambda: hosts[0].lost)
    assert [host for host, _ in hosts[0].lost] == [1]
