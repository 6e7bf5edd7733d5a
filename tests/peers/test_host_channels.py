"""Tests of channels to other hosts: kept while nothing changes, closed when it does, and opened without blocking
others.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConnectError
from atoll.peers import host_channels
from atoll.peers.data_port import DataPort
from atoll.peers.host_channels import HostChannels
from atoll.protocol.number_ranges import HOST_FEEDS
from atoll.transfers.channel import CONTROL, DataChannel
from atoll.transfers.inbox import Inbox
from atoll.wire.address import Address
from tests.transfers.ends import SECONDS
from tests.waiting import until

SECRET = "between hosts"


@pytest.fixture
def addresses(short_directory: Path) -> Iterator[list[str]]:
    """Return the data ports of two hosts."""
    ports = [DataPort(Address(path=str(short_directory / name)), Inbox(lambda *_: None)) for name in "ab"]
    for port in ports:
        port.set_peers((), SECRET)
    yield [str(port.address) for port in ports]
    for port in ports:
        port.close()


@pytest.fixture
def hosts(addresses: list[str]) -> Iterator[HostChannels]:
    channels = HostChannels()
    channels.set_hosts(enumerate(addresses), SECRET)
    yield channels
    channels.close()


def test_a_channel_is_opened_once_and_again_after_it_has_ended(hosts: HostChannels) -> None:
    assert not hosts.can_send_nowait(0, 1)
    channel = hosts.to(0)
    assert hosts.to(0) is channel
    assert hosts.can_send_nowait(0, 1)
    channel.close()
    assert not hosts.can_send_nowait(0, 1)
    assert hosts.to(0) is not channel


def test_channels_to_hosts_that_have_not_changed_are_kept(hosts: HostChannels, addresses: list[str]) -> None:
    channel = hosts.to(0)
    hosts.set_hosts(((0, addresses[0]), (1, "unix:/elsewhere")), SECRET)
    assert hosts.to(0) is channel
    assert not channel.is_closed


@pytest.mark.parametrize("change", ["another address", "another secret", "no such host"])
def test_channels_that_are_replaced_are_closed(hosts: HostChannels, addresses: list[str], change: str) -> None:
    channel = hosts.to(0)
    where = {"another address": ((0, addresses[1]),), "another secret": ((0, addresses[0]),), "no such host": ()}
    hosts.set_hosts(where[change], "new" if change == "another secret" else SECRET)
    assert channel.is_closed
    if change == "no such host":
        with pytest.raises(ConnectError, match="host 0 is not known"):
            hosts.to(0)
    else:
        assert hosts.to(0) is not channel


def test_the_end_of_a_silent_hosts_channel_does_not_make_its_successor_silent(
    hosts: HostChannels, addresses: list[str]
) -> None:
    for _ in range(5):
        hosts.to(0)
        hosts.fail(0, "host 0 was silent for 10 s")
        addresses.reverse()
        hosts.set_hosts(((0, addresses[0]),), SECRET)
        until(lambda: all(each.name != "atoll-data-peer" for each in threading.enumerate()))
        assert not hosts.to(0).is_closed, "it was restarted at another address"


def test_a_host_that_cannot_be_reached_is_dialed_again(hosts: HostChannels, addresses: list[str]) -> None:
    hosts.set_hosts(((0, "unix:/nowhere/at/all"),), SECRET)
    for _ in range(2):
        with pytest.raises(ConnectError, match="cannot reach a data port at unix:/nowhere/at/all"):
            hosts.to(0)
    hosts.set_hosts(((0, addresses[0]),), SECRET)
    assert not hosts.to(0).is_closed


def test_a_host_that_answers_late_holds_up_neither_the_control_thread_nor_other_hosts(
    hosts: HostChannels, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, dialing, dials = threading.Event(), threading.Semaphore(0), []
    connect = DataChannel.connect

    def connect_late(address: Address, *given: Any, **more: Any) -> DataChannel:
        if str(address) == addresses[0]:
            dials.append(address)
            dialing.release()
            assert answers.wait(SECONDS)
        return connect(address, *given, **more)

    monkeypatch.setattr(host_channels.DataChannel, "connect", connect_late)
    found: list[DataChannel] = []
    threads = [threading.Thread(target=lambda: found.append(hosts.to(0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert dialing.acquire(timeout=SECONDS)
    assert not hosts.to(1).is_closed
    assert not hosts.can_send_nowait(0, 1)
    hosts.set_hosts(enumerate(addresses), SECRET)
    hosts.set_hosts(((1, addresses[1]),), SECRET)  # without the host to which it is connecting
    answers.set()
    for thread in threads:
        thread.join(SECONDS)
    assert len(dials) == 1
    assert len(found) == 3
    assert all(channel is found[0] and channel.is_closed for channel in found)


@pytest.mark.parametrize("session", [1, 0], ids=["piece", "control message"])
def test_what_is_sent_while_a_channel_ends_is_reported_as_lost_or_fails(
    monkeypatch: pytest.MonkeyPatch, session: int
) -> None:
    """The kernel accepts bytes for a peer that has closed its end, so they would be lost without a report."""
    lost: list[tuple[int, int]] = []
    failed: list[OSError] = []
    closed = threading.Event()
    sent = (session, HOST_FEEDS.start if session else CONTROL)
    close = DataChannel.close

    def send_and_close(channel: DataChannel) -> None:
        if not closed.is_set():
            channel.carries_control = not session
            try:
                channel.send(*sent, [b"late"])
            except OSError as error:
                failed.append(error)
        close(channel)
        closed.set()

    monkeypatch.setattr(DataChannel, "close", send_and_close)
    channels = HostChannels(lambda host, feeds, why: lost.extend(feeds))
    with socket.create_server(("127.0.0.1", 0)) as server:
        channels.set_hosts([(0, f"127.0.0.1:{server.getsockname()[1]}")], SECRET)
        channels.to(0)
        peer, _ = server.accept()
        with peer:
            peer.shutdown(socket.SHUT_WR)
            assert closed.wait(SECONDS)
    channels.close()
    assert failed or sent in lost
