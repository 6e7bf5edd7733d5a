"""Tests that calls bypass the proxy if the client accepts a direct channel, and use the proxy otherwise."""

from __future__ import annotations

import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import StatusError
from atoll.host_services.calls.call_messages import (
    GREETING,
    DirectWanted,
    Returned,
    encode,
    first_call,
    is_notice,
)
from atoll.host_services.calls.client_calls import Calls
from atoll.peers.data_port import DataPort
from atoll.transfers.channel import DataChannel
from atoll.transfers.inbox import Inbox
from atoll.transfers.piece_contents import BufferContents
from atoll.transfers.transfer_engine import Piece
from atoll.wire.address import Address
from tests.transfers.ends import SECONDS, Ends, tcp_pair
from tests.waiting import until

SESSION = 7


class Client:
    """Client that replies to calls, using `proxy` for those from the proxy, and accepts or closes the offered
    socket.
    """

    def __init__(self, channel: DataChannel, takes: bool = True) -> None:
        self.takes = takes
        self.direct: DataChannel | None = None
        self.ways: list[str] = []
        self.answers = True
        self.start(channel, "proxy")

    def start(self, channel: DataChannel, way: str) -> None:
        def take(piece: Piece, content: Any, done: Any) -> None:
            done()
            if is_notice(piece.feed):
                return
            self.ways.append(way)
            if self.answers:
                channel.send(SESSION, piece.feed, encode(Returned(())))
            else:
                channel.shut_down()

        def receive() -> None:
            channel.receive(take, on_socket=self.offered)
            if way == "direct":
                channel.close()

        threading.Thread(target=receive, daemon=True).start()

    def offered(self, sock: socket.socket, host: int) -> None:
        if not self.takes:
            sock.close()
            return
        self.direct = DataChannel(sock)
        self.direct.send(0, first_call(0), encode(GREETING))
        self.start(self.direct, "direct")


def calls_over(ends: Ends) -> Calls:
    calls = Calls(lambda session: ends[0], 0, lambda *_: False)

    def answered(piece: Piece, content: Any, done: Any) -> None:
        calls.answered(SESSION, piece.feed, bytes(content), done)

    threading.Thread(target=ends[0].receive, args=(answered,), daemon=True).start()
    return calls


def call_until(calls: Calls, client: Client, way: str) -> None:
    deadline = time.monotonic() + SECONDS
    while way not in client.ways:
        assert time.monotonic() < deadline
        calls.call(SESSION, 4, (), [])


def test_calls_go_by_the_proxy_until_the_client_has_greeted_its_host(unix_ends: Ends):
    client = Client(unix_ends[1])
    calls = calls_over(unix_ends)
    call_until(calls, client, "direct")
    assert client.ways[0] == "proxy"
    before = len(client.ways)
    for _ in range(5):
        calls.call(SESSION, 4, (), [])
    assert client.ways[before:] == ["direct"] * 5
    calls.fail(SESSION)


def test_a_channel_is_offered_only_to_those_who_may_wait(unix_ends: Ends):
    client = Client(unix_ends[1])
    calls = calls_over(unix_ends)
    assert calls.channel_nowait(SESSION, unix_ends[0]) is None
    assert calls.channel_nowait(SESSION, unix_ends[0]) is None, "nothing was offered"
    assert client.direct is None
    assert calls.channel(SESSION, unix_ends[0]) is unix_ends[0]
    until(lambda: calls.channel_nowait(SESSION, unix_ends[0]) is not unix_ends[0])
    direct = calls.channel_nowait(SESSION, unix_ends[0])
    assert direct is not None
    assert direct is calls.channel(SESSION, unix_ends[0])
    calls.fail(SESSION)


def test_a_client_that_takes_no_channel_is_called_by_its_proxy(unix_ends: Ends):
    client = Client(unix_ends[1], takes=False)
    calls = calls_over(unix_ends)
    for _ in range(5):
        calls.call(SESSION, 4, (), [])
    assert client.ways == ["proxy"] * 5


def test_a_client_that_sends_contents_asks_for_a_channel(unix_ends: Ends):
    client = Client(unix_ends[1])
    calls = calls_over(unix_ends)
    unix_ends[1].send(SESSION, first_call(0), encode(DirectWanted()))
    until(lambda: client.direct is not None)
    calls.fail(SESSION)


def test_contents_on_a_direct_channel_are_feeds_of_its_session(unix_ends: Ends, short_directory: Path):
    arrived: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    calls = Calls(
        lambda session: unix_ends[0],
        0,
        lambda *_: False,
        lambda session, channel, on_answer: port.receive(session, channel, on_answer),
    )
    inbox = Inbox(lambda *feed: arrived.put(feed))
    port = DataPort(Address(path=str(short_directory / "data")), inbox, answers=calls)
    client = Client(unix_ends[1])
    calls.channel(SESSION, unix_ends[0])
    until(lambda: client.direct is not None)
    assert client.direct is not None
    content = np.arange(5 << 20, dtype=np.uint8)
    landed: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.direct.start_in_chunks(SESSION + 1, 9, BufferContents((memoryview(content),), 9), landed.put)
    assert landed.get(timeout=SECONDS) is None
    assert arrived.get(timeout=SECONDS) == (SESSION, 9), "the session is not what the client says"
    found, done = port.inbox.take(SESSION, 9)
    np.testing.assert_array_equal(found, content)
    done()
    calls.fail(SESSION)
    port.close()


def test_a_client_on_another_machine_is_offered_none():
    ends = tuple(map(DataChannel, tcp_pair()))
    client = Client(ends[1])
    calls = calls_over((ends[0], ends[1]))
    for _ in range(5):
        calls.call(SESSION, 4, (), [])
    assert client.ways == ["proxy"] * 5
    assert client.direct is None
    for each in ends:
        each.close()


def test_a_call_fails_with_its_channel_and_the_next_goes_by_the_proxy(unix_ends: Ends):
    client = Client(unix_ends[1])
    calls = calls_over(unix_ends)
    call_until(calls, client, "direct")
    client.answers = False
    with pytest.raises(StatusError, match=r"CANCELLED.*has no answer"):
        calls.call(SESSION, 4, (), [])
    client.answers = True
    client.ways.clear()
    call_until(calls, client, "proxy")
    calls.fail(SESSION)


def test_the_channel_ends_with_the_session(unix_ends: Ends):
    client = Client(unix_ends[1])
    calls = calls_over(unix_ends)
    call_until(calls, client, "direct")
    assert client.direct is not None
    ended = threading.Event()
    ours = client.direct

    def watch() -> None:
        while not ended.is_set():
            try:
                ours.send(0, first_call(0) + 9, [b"is anybody there"])
            except OSError:
                ended.set()
            time.sleep(0.001)

    threading.Thread(target=watch, daemon=True).start()
    calls.fail(SESSION)
    assert ended.wait(SECONDS)
