"""Several feeds in one piece: how they are sent, stored and read, and that only hosts may send them."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import Code, FrameError, Status, StatusError
from atoll.peers.data_port import DataPort
from atoll.protocol.number_ranges import CALL_FEEDS, CLIENT_FEEDS, HOST_FEEDS
from atoll.transfers.channel import DataChannel
from atoll.transfers.inbox import Inbox, InboxStatistics
from atoll.transfers.liveness import Liveness
from atoll.transfers.piece_contents import BufferContents, Grouped
from atoll.transfers.socket_engine import SocketPiece
from atoll.transfers.transfer_engine import GROUP_ALIGNMENT, MAX_GROUP, Group, group_bytes
from atoll.wire.address import Address
from tests.transfers.ends import Receiver, content, frame, received, tcp_pair
from tests.waiting import until

FIRST = HOST_FEEDS.start
SIZES = {"socket": [3, 0, 64, 1000], "large": [100_000, 7, 200_000, 64, 900_000]}


def grouped(sizes: list[int]) -> Grouped:
    return Grouped(
        [(FIRST + i, BufferContents((content(size, i).data,) if size else ())) for i, size in enumerate(sizes)]
    )


def stored(sizes: list[int], session: int = 5) -> tuple[Inbox, list[str]]:
    """An inbox with a group, and a note once its memory was given back."""
    inbox, released = Inbox(lambda session, feed: None), list[str]()
    contents = grouped(sizes)
    memory = bytearray(contents.nbytes)
    contents.write_into(memoryview(memory))
    inbox.put_group(session, contents.group, memory, lambda: released.append("released"))
    return inbox, released


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_feed_of_a_group_begins_at_an_aligned_place(sizes: list[int]) -> None:
    contents = grouped(sizes)
    assert contents.nbytes == group_bytes(contents.group)
    whole = bytearray(contents.nbytes)
    contents.write_into(memoryview(whole))
    assert b"".join(contents.views()) == bytes(whole)
    assert b"".join(contents.slice(5, contents.nbytes - 5)) == bytes(whole)[5:-5]
    start = 0
    for i, size in enumerate(sizes):
        assert start % GROUP_ALIGNMENT == 0
        assert whole[start : start + size] == content(size, i).tobytes()
        start += -(-size // GROUP_ALIGNMENT) * GROUP_ALIGNMENT


@pytest.fixture(params=["unix", "tcp"])
def ports(request: pytest.FixtureRequest, short_directory: Path) -> Iterator[tuple[DataPort, DataPort]]:
    """The data ports of two hosts."""
    hosts = []
    for number in range(2):
        address = Address(path=str(short_directory / f"{number}"))
        hosts.append(
            DataPort(
                address if request.param == "unix" else Address(host="127.0.0.1"), Inbox(lambda session, feed: None)
            )
        )
    for host in hosts:
        host.set_peers(tuple((number, str(each.address)) for number, each in enumerate(hosts)), "between hosts")
    yield hosts[0], hosts[1]
    for host in hosts:
        host.close()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_group_of_feeds_arrives_whatever_way_it_takes(ports: tuple[DataPort, DataPort], sizes: list[int]) -> None:
    contents, feeds = grouped(sizes), range(FIRST, FIRST + len(sizes))
    inbox = ports[1].inbox
    ports[0].to_host(1).send_contents(9, FIRST, contents)
    until(lambda: inbox.await_all(9, feeds, lambda: None))
    taken = inbox.take_all(9, feeds)
    for i, feed in enumerate(feeds):
        assert bytes(taken[feed][0]) == content(sizes[i], i).tobytes()
        taken[feed][1]()
    assert inbox.statistics() == InboxStatistics(1, 0, 0)


def test_the_memory_of_a_group_is_given_back_once_all_of_it_was_read_or_dropped() -> None:
    inbox, released = stored([10, 20, 30])
    assert inbox.statistics() == InboxStatistics(1, 3, 60)
    _, done = inbox.take(5, FIRST + 1)
    inbox.drop(5, FIRST)
    done()
    assert not released
    inbox.drop_session(5)
    assert released == ["released"]
    assert inbox.statistics() == InboxStatistics(0, 0, 0)


def test_a_group_ends_the_waits_for_all_of_its_feeds_with_one_call() -> None:
    inbox, woken = Inbox(lambda session, feed: None), list[int]()
    wake = partial(woken.append, 1)
    assert not inbox.await_all(5, [FIRST, FIRST + 2], wake, waiter=1)
    assert not inbox.await_all(5, [FIRST + 1], wake, waiter=2)
    assert not inbox.await_all(5, [FIRST, FIRST + 3], wake, waiter=3)
    inbox.put_group(5, grouped([1, 1, 1]).group, bytes(129), lambda: None)
    assert woken == [1]
    assert inbox.await_all(5, range(FIRST, FIRST + 3), lambda: None)
    assert not inbox.await_all(5, [FIRST + 3], lambda: None)


def test_a_feed_of_a_group_that_has_failed_is_dropped_and_the_others_stay() -> None:
    inbox, released = Inbox(lambda session, feed: None), list[str]()
    inbox.fail(5, FIRST + 1, 1, Status(Code.CANCELLED, "its launch has failed"))
    inbox.put_group(5, grouped([4, 4, 4]).group, bytes(132), lambda: released.append("released"))
    with pytest.raises(StatusError, match="its launch has failed"):
        inbox.take(5, FIRST + 1)
    for feed in (FIRST, FIRST + 2):
        inbox.take(5, feed)[1]()
    assert released == ["released"]
    inbox.drop_session(5)
    inbox.put_group(5, grouped([4, 4, 4]).group, bytes(132), lambda: released.append("late"))
    assert released == ["released", "late"]
    assert inbox.statistics() == InboxStatistics(0, 0, 0)


def test_a_group_beyond_the_bound_of_its_session_fails_as_a_whole() -> None:
    inbox, released = Inbox(lambda session, feed: None, max_bytes=100), list[int]()
    for first in (0, 2, 4):
        group = tuple((FIRST + first + i, 64) for i in range(2))
        inbox.put_group(5, group, bytes(128), lambda first=first: released.append(first))  # type: ignore[misc]
    inbox.take_all(5, [FIRST, FIRST + 1])
    assert released == [2, 4]
    for feed in range(FIRST + 2, FIRST + 6):
        with pytest.raises(StatusError, match="wait at this data port"):
            inbox.take(5, feed)


def test_a_group_that_was_announced_waits_for_capacity_unless_one_of_its_feeds_is_awaited() -> None:
    inbox, granted = Inbox(lambda *_: None, max_bytes=100), list[int]()
    groups = [tuple((FIRST + 10 * number + i, 64) for i in range(2)) for number in range(3)]
    for number, group in enumerate(groups):
        also = [feed for feed, _ in group]
        inbox.admit(1, also[0], 128, 0, lambda number=number: granted.append(number), also)  # type: ignore[misc]
    assert granted == [0]
    assert not inbox.await_all(1, [FIRST + 21], lambda: None)
    assert granted == [0, 2]
    assert inbox.statistics() == InboxStatistics(0, 0, 256, 1)
    for number in (0, 2):
        inbox.put_group(1, groups[number], bytes(128), lambda: None)
    assert inbox.statistics() == InboxStatistics(1, 4, 256, 1)
    for feed in (FIRST, FIRST + 1, FIRST + 20, FIRST + 21):
        inbox.take(1, feed)
    assert granted == [0, 2, 1]
    inbox.withdraw(1, FIRST + 10)
    assert inbox.nbytes == 0


BAD: list[tuple[Group, int]] = [
    (((CLIENT_FEEDS.start + 1, 2),), 2),
    (((CALL_FEEDS.start, 2),), 2),
    (((FIRST, -1), (FIRST + 1, 66)), 2),
    (((FIRST, 3), (FIRST + 1, 1)), 4),
    (((FIRST, 3), (FIRST + 1, 1)), 64),
]


@pytest.mark.parametrize(("group", "nbytes"), BAD)
def test_a_group_that_cannot_be_ends_the_channel(ports: tuple[DataPort, DataPort], group: Group, nbytes: int) -> None:
    channel = DataChannel.dial(ports[0].address)
    channel.open(0, "between hosts")
    channel._socket.send(SocketPiece(9, FIRST, nbytes, group=group), [memoryview(bytes(max(0, nbytes)))])
    with pytest.raises((EOFError, OSError)):
        channel.receive_open()
    assert ports[0].inbox.statistics() == InboxStatistics(0, 0, 0)
    channel.close()


def test_a_client_cannot_send_several_feeds_in_one_piece(ports: tuple[DataPort, DataPort]) -> None:
    ports[0].open_session(5, "secret five")
    channel = DataChannel.dial(ports[0].address)
    channel.open(5, "secret five")
    channel.send_contents(9, FIRST, grouped([1, 2]))
    with pytest.raises((EOFError, OSError)):
        channel.receive_open()
    assert ports[0].inbox.statistics() == InboxStatistics(0, 0, 0)
    channel.close()


def test_who_reads_pieces_of_one_feed_refuses_others(raw: tuple[socket.socket, DataChannel]) -> None:
    receiver = received(raw, frame(SocketPiece(1, FIRST, 1, group=((FIRST, 1),)), b"x"))
    assert isinstance(receiver.error, FrameError)
    assert "several feeds" in str(receiver.error)


def test_a_group_with_too_many_feeds_is_refused_before_it_is_decoded(raw: tuple[socket.socket, DataChannel]) -> None:
    receiver = received(raw, frame(SocketPiece(1, FIRST, 1, group=((0, 0),) * (MAX_GROUP + 1))))
    assert isinstance(receiver.error, FrameError)
    assert f"length <= {MAX_GROUP}" in str(receiver.error)


def test_all_feeds_of_a_group_are_lost_with_it() -> None:
    with contextlib.ExitStack() as stack:
        ends = [DataChannel(each) for each in tcp_pair()]
        for each in ends:
            stack.callback(each.close)
        ends[0].send_contents(3, FIRST, grouped([1, 2]))
        ends[0].send(4, FIRST + 9, [b"another"])
        assert isinstance(ends[0].liveness, Liveness)
        assert ends[0].liveness.unconfirmed() == [(3, FIRST), (3, FIRST + 1), (4, FIRST + 9)]
        ends[0].shut_down()
        Receiver(ends[1]).join()


def test_several_readers_give_the_memory_back_once() -> None:
    sizes = [1] * 50
    inbox, released = stored(sizes)
    taken = [inbox.take(5, FIRST + i) for i in range(len(sizes))]
    for (view, done), i in zip(taken, itertools.count()):
        assert np.frombuffer(view, np.uint8)[0] == content(1, i)[0]
        assert not released
        done()
    assert released == ["released"]
