"""Tests of the proxy between workers' calls and their client: each call gets a reply, and unused callables
are dropped.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import Code, Details, Kind, Status, StatusError, failure
from atoll.host_services.calls.call_messages import (
    GREETING,
    Arrived,
    Call,
    Dial,
    DirectWanted,
    Landed,
    Raised,
    ReadWanted,
    Released,
    Retained,
    Returned,
    SlotsWanted,
    Unread,
    Wanted,
    Written,
    decode,
    encode,
    first_call,
)
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import SCRIPT_FEEDS
from atoll.session.client_relay import ClientPort, ClientRelay
from atoll.session.downloads import DirectDownload
from atoll.session.session_interfaces import HostAccess
from atoll.transfers.channel import DataChannel, Open
from atoll.transfers.shared_slots import SlotWriter
from atoll.wire.address import Address, parse_address
from tests.session.fake_cluster import FakeCluster
from tests.transfers.ends import SECONDS, Receiver, streams_of
from tests.waiting import until

SESSION = 11


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield FakeCluster()
    loop.close()


@pytest.fixture
def relay(cluster: FakeCluster, short_directory: Path) -> Iterator[ClientRelay]:
    port = ClientPort(lambda: Address(path=str(short_directory / "calls")))
    yield port.relay(SESSION, cluster.session, lambda call, *arguments: call(*arguments))
    port.close_relay(SESSION)
    port.close()


@pytest.fixture
def far_relay(cluster: FakeCluster) -> Iterator[ClientRelay]:
    """Return a relay at a TCP port, like that of `atoll proxy`."""
    port = ClientPort(lambda: Address(host="127.0.0.1", port=0))
    yield port.relay(SESSION, cluster.session, lambda call, *arguments: call(*arguments))
    port.close_relay(SESSION)
    port.close()


def connected(relay: ClientRelay) -> DataChannel:
    where = relay.where
    channel = DataChannel.connect(parse_address(where.address), where.session, where.secret)
    until(lambda: relay.channel is not None)
    return channel


def listening(channel: DataChannel) -> Receiver:
    """Receive the messages that a client gets after its greeting."""
    receiver = Receiver(channel)
    _, _, content = receiver.wait(1)[0]
    assert decode(content)[0] == GREETING
    del receiver.pieces[0]  # others may have arrived
    return receiver


def piece(message: Any) -> bytes:
    return b"".join(bytes(part) for part in encode(message))


def give(relay: ClientRelay, feed: int, message: Any) -> None:
    given_back = threading.Event()
    relay.call(feed, piece(message), given_back.set)
    assert given_back.is_set()


def answers(cluster: FakeCluster) -> list[tuple[int, Any]]:
    return [(feed, decode(content)[0]) for feed, content in cluster.answers]


def test_a_call_goes_to_the_client_and_its_answer_to_the_host(cluster: FakeCluster, relay: ClientRelay):
    channel = connected(relay)
    receiver = listening(channel)
    give(relay, first_call(1) + 5, Call(3, ()))
    ((_, feed, content),) = receiver.wait(1)
    assert (feed, decode(content)[0]) == (first_call(1) + 5, Call(3, ()))
    channel.send(0, feed, encode(Returned(())))
    channel.send(0, feed, encode(Returned(())))  # nobody awaits another
    channel.send(0, first_call(2) + 9, encode(Returned(())))
    channel.send(0, 17, [b"no call"])
    channel.close()
    receiver.join()
    until(lambda: relay.channel is None)
    assert answers(cluster) == [(first_call(1) + 5, Returned(()))]


def test_contents_of_arrays_are_forwarded_in_parts(relay: ClientRelay):
    feed, done = SCRIPT_FEEDS.start, threading.Event()
    relay.forward(feed, b"for nobody", False, done.set)
    assert done.is_set()
    channel = connected(relay)
    receiver = listening(channel)
    relay.forward(feed, b"ab", True, lambda: None)
    relay.forward(feed, b"cd", False, lambda: None)
    assert [(each, bytes(content)) for _, each, content in receiver.wait(2)] == [(feed, b"ab"), (feed, b"cd")]
    channel.close()
    receiver.join()


def test_the_client_learns_which_contents_do_not_arrive(relay: ClientRelay):
    relay.cannot_read((3,))
    assert not relay.has_client
    channel = connected(relay)
    assert relay.has_client
    receiver = listening(channel)
    lost = failure(Code.DATA_LOSS, "host 1 is gone", Details(Kind.LINK, hosts=(1,)))
    relay.cannot_read((5,), lost)
    (sent,) = [decode(content)[0] for _, _, content in receiver.wait(1)]
    assert sent == Unread((5,), error=Status(int(Code.DATA_LOSS), "host 1 is gone [atoll: link, host 1]"))
    relay.host_lost(1, was_local=False)  # each read learns whether its contents were on the way
    relay.host_lost(2, was_local=True)
    assert [decode(content)[0] for _, _, content in receiver.wait(2)][1:] == [Unread(())]
    channel.close()
    receiver.join()


def test_the_client_is_asked_for_contents_until_they_have_landed(cluster: FakeCluster, relay: ClientRelay):
    write, feed = SCRIPT_FEEDS.start + 1, cluster.session.feed()
    relay.writes.start(write, feed, (1,), 4)  # nobody is connected yet
    channel = connected(relay)
    receiver = listening(channel)
    assert [decode(content)[0] for _, _, content in receiver.wait(1)] == [Wanted(write, feed, 1)]
    channel.send(0, first_call(0), encode(Landed(write)))
    assert [decode(content)[0] for _, _, content in receiver.wait(2)][1:] == [Written(write)]
    cluster.session.handle(m.HostsFailed((1,)))
    assert cluster.take()[-1] == m.FailureAcknowledged((1,), (), ()), "the host had the feed"
    channel.close()
    receiver.join()


def test_contents_that_the_client_sends_here_are_uploaded(cluster: FakeCluster, relay: ClientRelay):
    channel = connected(relay)
    receiver = listening(channel)
    write, feed = SCRIPT_FEEDS.start + 1, cluster.session.feed()
    relay.writes.start(write, feed, (1,), 4)
    channel.send(0, write, [b"ab"], more=True)
    channel.send(0, write + 5, [b"for nobody"])
    channel.send(0, write, [b"cdef"])  # more than was announced
    messages = [decode(content)[0] for _, _, content in receiver.wait(2)]
    assert messages == [Wanted(write, feed, 1), Written(write)]
    assert cluster.uploads == [((1,), feed, b"abcd")]
    channel.close()
    receiver.join()


def test_large_contents_take_further_connections_of_the_clients_channel(cluster: FakeCluster, far_relay: ClientRelay):
    relay = far_relay
    channel = connected(relay)
    receiver = listening(channel)
    served = relay.channel
    assert served is not None
    up, down, large = SCRIPT_FEEDS.start, SCRIPT_FEEDS.start + 1, bytes(range(256)) * (1 << 13)

    def wait_for(holds: Callable[[], bool]) -> None:
        until(lambda: relay.channel is not served or holds())
        assert relay.channel is served, "a further connection has replaced the channel"

    for count in (1, 2):
        threading.Thread(target=relay.forward, args=(down, large, False, lambda: None), daemon=True).start()
        wait_for(lambda expected=count: sum(feed == down for _, feed, _ in receiver.pieces) == expected)
        wait_for(lambda: streams_of(served) > 0)
    relay.writes.start(up, cluster.session.feed(), (1,), len(large))
    sender = threading.Thread(target=channel.send_in_parts, args=(0, up, large), daemon=True)
    sender.start()
    wait_for(lambda: bool(cluster.uploads) and not sender.is_alive())
    wait_for(lambda: streams_of(channel) > 0)
    assert cluster.uploads[0][2] == large
    assert [content == large for _, feed, content in receiver.pieces if feed == down] == [True, True]
    opening = Open(SESSION, relay.where.secret, "another", "sends")
    stray = DataChannel.dial(parse_address(relay.where.address))
    stray.send_opening(opening)
    until(lambda: _has_ended(stray))
    assert relay.channel is served
    channel.close()
    receiver.join()


def _has_ended(channel: DataChannel) -> bool:
    try:
        channel.receive_open()
    except (EOFError, OSError):
        channel.close()
        return True
    return False


def test_a_write_whose_contents_the_client_does_not_have_gets_none(cluster: FakeCluster, relay: ClientRelay):
    channel = connected(relay)
    receiver = listening(channel)
    write, feed = SCRIPT_FEEDS.start + 1, cluster.session.feed()
    relay.writes.start(write, feed, (1,), 4)
    channel.send_in_parts(0, write, memoryview(b""))
    receiver.wait(2)
    assert cluster.uploads == [((1,), feed, b"")]
    channel.close()
    receiver.join()


def test_parts_from_a_former_channel_are_dropped(cluster: FakeCluster, relay: ClientRelay):
    former = connected(relay)
    receiver = listening(former)
    write, other = SCRIPT_FEEDS.start + 1, SCRIPT_FEEDS.start + 2
    feed = cluster.session.feed()
    relay.writes.start(write, feed, (1,), 4)
    relay.writes.start(other, cluster.session.feed(), (1,), 4)
    former.send(0, write, [b"ab"], more=True)
    former.send(0, first_call(0), encode(Landed(other)))
    receiver.wait(3)  # the part has arrived, because its channel keeps the order
    before = relay.channel
    channel = connected(relay)
    until(lambda: relay.channel is not before)
    channel.send(0, write, [b"abcd"])
    until(lambda: cluster.uploads)
    assert cluster.uploads == [((1,), feed, b"abcd")]
    former.close()
    channel.close()
    receiver.join()


def test_local_hosts_are_asked_for_direct_channels_once_the_client_sends_contents(
    cluster: FakeCluster, relay: ClientRelay
):
    cluster.local = {1}
    channel = connected(relay)
    receiver = listening(channel)
    for _ in range(2):
        channel.send(0, first_call(0), encode(DirectWanted()))
    until(lambda: cluster.answers)
    relay.host_opened(0, is_local=False)
    relay.host_opened(1, is_local=True)
    assert answers(cluster) == [(first_call(1), DirectWanted())] * 2
    channel.close()
    receiver.join()


def test_the_client_may_dial_hosts_on_other_machines_once_it_sends_or_reads_much(
    cluster: FakeCluster, relay: ClientRelay
):
    cluster.far = {1: HostAccess("10.0.0.1:7", 5, "its secret", 10.0, None)}
    channel = connected(relay)
    receiver = listening(channel)
    relay.host_opened(1, is_local=False)  # the client has no use for it yet
    channel.send(0, first_call(0), encode(DirectWanted()))
    receiver.wait(1)
    relay.host_opened(1, is_local=False)  # it has restarted
    dial = Dial(1, "10.0.0.1:7", 5, "its secret", 10.0)
    assert [decode(content)[0] for _, _, content in receiver.wait(2)] == [dial, dial]
    assert "its secret" not in repr(dial)
    channel.close()
    receiver.join()


def test_contents_on_the_clients_own_channel_are_expected_until_it_has_them_or_a_host_cannot_send_them(
    cluster: FakeCluster, relay: ClientRelay
):
    lost: list[Status] = []
    downloads = cluster.session.downloads
    for feed in (SCRIPT_FEEDS.start, SCRIPT_FEEDS.start + 1):
        downloads.expect(DirectDownload(feed, (0,), lost.append))
    channel = connected(relay)
    receiver = listening(channel)
    channel.send(0, first_call(0), encode(Arrived(SCRIPT_FEEDS.start)))
    give(relay, first_call(1), Unread((SCRIPT_FEEDS.start + 1,)))
    assert [decode(content)[0] for _, _, content in receiver.wait(1)] == [Unread((SCRIPT_FEEDS.start + 1,))]
    until(lambda: not downloads.any())
    assert lost == []
    channel.close()
    receiver.join()


def test_an_array_that_a_host_cannot_send_at_once_is_read_in_the_other_way(
    cluster: FakeCluster, relay: ClientRelay
) -> None:
    first, others = SCRIPT_FEEDS.start, []
    cluster.local = {1}
    wanted = ReadWanted(first, 77)
    assert not relay.read_directly(2, wanted, lambda: others.append(first)), "the client has no channel yet"
    channel = connected(relay)
    receiver = listening(channel)
    assert not relay.read_directly(0, wanted, lambda: others.append(first)), "host 0 is on another machine"
    for feed in (first, first + 1):
        assert relay.read_directly(2, ReadWanted(feed, 77), lambda feed=feed: others.append(feed))
    assert cluster.reads == [(1, ReadWanted(first, 77)), (1, ReadWanted(first + 1, 77))]
    give(relay, first_call(1), Unread((first + 1,)))
    assert others == [first + 1]
    give(relay, first_call(1), Unread((first + 1,)))  # the client can read it as well
    assert others == [first + 1]
    assert [decode(content)[0] for _, _, content in receiver.wait(1)] == [Unread((first + 1,))]
    channel.close()
    receiver.join()


def test_of_many_reads_the_first_have_no_other_way(cluster: FakeCluster, relay: ClientRelay) -> None:
    cluster.local, others = {1}, []
    channel = connected(relay)
    receiver = listening(channel)
    feeds = range(SCRIPT_FEEDS.start, SCRIPT_FEEDS.start + 300)
    for feed in feeds:
        relay.read_directly(2, ReadWanted(feed, 77), lambda feed=feed: others.append(feed))
    give(relay, first_call(1), Unread((feeds[0], feeds[-1])))
    assert others == [feeds[-1]]
    assert [decode(content)[0] for _, _, content in receiver.wait(1)] == [Unread((feeds[0],))]
    channel.close()
    receiver.join()


def test_a_client_that_leaves_while_hosts_await_its_contents_ends_its_session(cluster: FakeCluster, relay: ClientRelay):
    channel = connected(relay)
    receiver = listening(channel)
    relay.writes.start(SCRIPT_FEEDS.start, cluster.session.feed(), (1,), 4)
    receiver.wait(1)
    channel.close()
    receiver.join()
    until(lambda: cluster.session.lost is not None)
    assert cluster.session.lost is not None
    assert "the connection on which the client sends contents of arrays has ended" in cluster.session.lost.message


def test_a_hosts_own_way_to_the_client_is_passed_on(relay: ClientRelay):
    channel = connected(relay)
    passed: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    receiving = threading.Thread(
        target=channel.receive, args=(lambda *_: None,), kwargs={"on_socket": lambda sock, host: passed.put(sock)}
    )
    receiving.start()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        relay.pass_socket(theirs, 1)
        with passed.get(timeout=SECONDS) as arrived:
            ours.sendall(b"straight")
            assert arrived.recv(8) == b"straight"
    channel.close()
    receiving.join(SECONDS)


def test_a_hosts_own_way_ends_where_there_is_no_client(relay: ClientRelay):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            relay.pass_socket(theirs, 1)
        ours.settimeout(SECONDS)
        assert ours.recv(1) == b""


def test_without_a_client_calls_are_answered(cluster: FakeCluster, relay: ClientRelay):
    give(relay, first_call(0) + 1, Call(3, ()))
    ((feed, answer),) = answers(cluster)
    assert feed == first_call(0) + 1
    assert isinstance(answer, Raised)
    assert answer.cancelled


def test_a_client_that_leaves_leaves_no_call_unanswered(cluster: FakeCluster, relay: ClientRelay):
    channel = connected(relay)
    receiver = listening(channel)
    give(relay, first_call(0) + 1, Call(3, ()))
    give(relay, first_call(1) + 1, Call(3, ()))
    receiver.wait(2)
    cluster.session._channels.calls.host_lost(1, was_local=True)  # type: ignore[union-attr]
    channel.close()
    until(lambda: cluster.answers)
    assert [feed for feed, _ in answers(cluster)] == [first_call(0) + 1]


def test_a_client_that_connects_anew_leaves_no_call_of_its_old_connection_unanswered(
    cluster: FakeCluster, relay: ClientRelay
):
    old = connected(relay)
    receiver = listening(old)
    give(relay, first_call(0) + 1, Call(3, ()))
    receiver.wait(1)
    before = relay.channel
    new = connected(relay)
    until(lambda: relay.channel is not before)
    until(lambda: cluster.answers)
    old.close()
    new.close()
    assert [feed for feed, _ in answers(cluster)] == [first_call(0) + 1]


def test_who_does_not_know_the_secret_gets_no_calls(relay: ClientRelay):
    for session, secret in ((SESSION, "wrong"), (SESSION + 1, relay.where.secret)):
        stranger = DataChannel.connect(parse_address(relay.where.address), session, secret)
        assert Receiver(stranger).join() is None, "it was closed"
        stranger.close()


def test_callables_are_released_when_the_client_and_the_last_host_have_dropped_their_function(relay: ClientRelay):
    channel = connected(relay)
    receiver = listening(channel)
    for host in (0, 1, 2):
        give(relay, first_call(host), Retained((4, 5)))
    give(relay, first_call(0), Released((4, 5)))
    relay.unloaded((4, 5))
    relay.host_lost(2, was_local=False)
    give(relay, first_call(1) + 1, Call(9, ()))  # shows that nothing came before it
    receiver.wait(1)
    give(relay, first_call(1), Released((4, 5)))
    messages = [decode(content)[0] for _, _, content in receiver.wait(2)]
    assert messages == [Call(9, ()), Released((4, 5))]
    channel.close()
    receiver.join()


def test_callables_are_kept_for_a_host_that_has_yet_to_say_that_it_may_call_them(relay: ClientRelay):
    channel = connected(relay)
    receiver = listening(channel)
    relay.compiled((4, 5), (0,))
    relay.unloaded((4, 5))
    give(relay, first_call(0) + 1, Call(4, ()))
    receiver.wait(1)
    give(relay, first_call(0), Retained((4, 5)))
    give(relay, first_call(0), Released((4, 5)))
    messages = [decode(content)[0] for _, _, content in receiver.wait(2)]
    assert messages == [Call(4, ()), Released((4, 5))]
    channel.close()
    receiver.join()


class Slots:
    """The slots that a client gets on its channel."""

    def __init__(self, channel: DataChannel) -> None:
        self._channel = channel
        self.found: queue.SimpleQueue[SlotWriter] = queue.SimpleQueue()
        self._reading = threading.Thread(
            target=channel.receive,
            args=(lambda piece, content, done: done(),),
            kwargs={"on_memory": lambda descriptor: self.found.put(SlotWriter(descriptor))},
        )
        self._reading.start()

    def writer(self) -> SlotWriter:
        for _ in range(2):  # asked twice, the proxy answers once
            self._channel.send(0, first_call(0), encode(SlotsWanted()))
        return self.found.get(timeout=SECONDS)

    def close(self) -> None:
        self._channel.close()
        self._reading.join(SECONDS)


def test_the_client_puts_small_contents_into_slots_of_its_channel(relay: ClientRelay) -> None:
    write = SCRIPT_FEEDS.start + 1
    with pytest.raises(StatusError, match="INVALID_ARGUMENT: the client has sent no contents"):
        relay.take_small(write, 4)
    slots = Slots(connected(relay))
    slots.writer()[write] = b"1234"
    assert relay.take_small(write, 4) == b"1234"
    with pytest.raises(StatusError, match="INVALID_ARGUMENT: the client has sent no contents"):
        relay.take_small(write, 4)
    slots.close()
    assert slots.found.empty()


def test_small_contents_outlive_the_channel_on_which_the_client_got_their_slots(relay: ClientRelay) -> None:
    write = SCRIPT_FEEDS.start + 1
    before = Slots(connected(relay))
    old = before.writer()
    old[write] = b"1234"
    before.close()
    until(lambda: relay.channel is None)
    after = Slots(connected(relay))
    assert relay.take_small(write, 4) == b"1234"
    new = after.writer()
    old[write + 1] = b"5678"  # by a thread that had found the slots before
    new[write + 2] = b"90ab"
    assert [relay.take_small(write + i, 4) for i in (2, 1)] == [b"90ab", b"5678"]
    after.close()
