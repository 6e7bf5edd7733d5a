"""Tests of chunked transfers between data ports on TCP: streams, credits, order, memory limits, turns, and
early ends.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from atoll.errors import Code, Status, StatusError
from atoll.peers.data_port import DataPort
from atoll.protocol.number_ranges import HOST_FEEDS
from atoll.transfers import inbox as inboxes
from atoll.transfers import stream_transfers
from atoll.transfers.channel import DataChannel, Open
from atoll.transfers.inbox import Inbox
from atoll.transfers.piece_contents import BufferContents, FileContents, as_views
from atoll.transfers.receive_buffer_pool import RECEIVE_BUFFERS
from atoll.transfers.stream_transfers import CHUNK_BYTES, SendQueue
from atoll.transfers.streams import STREAM_THRESHOLD, STREAMS
from atoll.transfers.transfer_engine import Piece
from atoll.wire.address import Address
from tests.transfers.ends import Receiver, content, streams_of, tcp_pair
from tests.waiting import until

LONG = 20.0
Refuse = Callable[[Status], None]


class Port:
    """A data port on TCP with one session, its arrivals, and a proxy's channel to it."""

    def __init__(self, max_bytes: int) -> None:
        self.arrived: list[tuple[int, int]] = []
        self._changed = threading.Condition()
        self.has_memory = True
        self.inbox = Inbox(self._note, max_bytes, has_memory=lambda nbytes: self.has_memory)
        self.port = DataPort(Address(host="127.0.0.1"), self.inbox)
        self.port.open_session(5, "secret")
        self.channel = DataChannel.connect(self.port.address, 5, "secret")
        self.receiver = Receiver(self.channel)

    def _note(self, session: int, feed: int) -> None:
        with self._changed:
            self.arrived.append((session, feed))
            self._changed.notify_all()

    def wait(self, count: int) -> list[tuple[int, int]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.arrived) >= count, LONG), self.arrived
            return list(self.arrived)

    def start(self, feed: int, nbytes: int, launch: int = 0) -> Ended:
        ended = Ended()
        self.channel.start(5, feed, BufferContents(as_views([content(nbytes, feed)]), launch), ended)
        return ended

    def close(self) -> None:
        self.channel.close()
        self.port.close()


class Ended:
    """How a transfer that was started has ended."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.error: BaseException | None = None

    def __call__(self, error: BaseException | None) -> None:
        self.error = error
        self._event.set()

    def wait(self) -> BaseException | None:
        assert self._event.wait(LONG)
        return self.error

    @property
    def is_set(self) -> bool:
        return self._event.is_set()


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    """A port, which holds at most `request.param` bytes of a session."""
    made = Port(getattr(request, "param", inboxes.MAX_INBOX_BYTES))
    yield made
    made.close()


@pytest.mark.parametrize(
    "nbytes", [STREAM_THRESHOLD, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 9 * CHUNK_BYTES + 7]
)
def test_contents_arrive_whole_whatever_number_of_chunks_they_make(port: Port, nbytes: int) -> None:
    for feed in (1, 2):
        port.channel.send(5, feed, [content(nbytes, feed)])
    port.wait(2)
    for feed in (1, 2):
        assert bytes(port.inbox.take(5, feed)[0]) == content(nbytes, feed).tobytes()


def test_several_buffers_make_one_piece(port: Port) -> None:
    parts = [content(nbytes, nbytes) for nbytes in (10, CHUNK_BYTES + 5, 300_000, 1, 2 * CHUNK_BYTES)]
    port.channel.send(5, 1, parts)
    port.wait(1)
    assert bytes(port.inbox.take(5, 1)[0]) == b"".join(part.tobytes() for part in parts)


def test_the_side_that_dialed_opens_streams_for_the_side_that_sends_bulk(port: Port) -> None:
    assert streams_of(port.channel) == 0
    to_proxy = port.port.to_proxy(5)
    to_proxy.send(5, 7, [content(2 * CHUNK_BYTES)])
    assert port.receiver.wait(1)[0] == (5, 7, content(2 * CHUNK_BYTES).tobytes())
    until(lambda: streams_of(to_proxy) == STREAMS)
    assert streams_of(port.channel) == 0
    small = to_proxy.statistics().socket_bytes_out
    to_proxy.send(5, 8, [content(4 * CHUNK_BYTES)])
    assert port.receiver.wait(2)[1] == (5, 8, content(4 * CHUNK_BYTES).tobytes())
    assert to_proxy.statistics().socket_bytes_out - small < 1000  # the channel's own connection is free for the others


def test_without_threads_for_streams_bulk_arrives_on_the_channels_own_connection(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == "atoll-stream-dial":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    to_proxy = port.port.to_proxy(5)
    to_proxy.send(5, 7, [content(2 * CHUNK_BYTES)])
    assert port.receiver.wait(1)[0] == (5, 7, content(2 * CHUNK_BYTES).tobytes())
    port.channel.send(5, 1, [content(2 * CHUNK_BYTES)])
    assert port.wait(1) == [(5, 1)]
    assert (streams_of(to_proxy), streams_of(port.channel)) == (0, 0)


def test_a_stream_with_another_secret_is_refused(port: Port) -> None:
    stranger = DataChannel.dial(port.port.address)
    stranger.send_opening(Open(5, "wrong", "name", True))
    assert Receiver(stranger).join() is None  # closed
    stranger.close()
    port.channel.send(5, 1, [content(CHUNK_BYTES)])
    port.wait(1)


def test_parts_come_in_order_and_no_more_of_them_than_the_window(port: Port) -> None:
    to_proxy = port.port.to_proxy(5)
    port.receiver.recycle = False
    part = 8 * CHUNK_BYTES
    sent = content(7 * part + 5)
    sender = threading.Thread(target=to_proxy.send_in_parts, args=(5, 1, sent))
    sender.start()
    pieces = port.receiver.wait(stream_transfers.WINDOW_PARTS)
    time.sleep(0.3)
    assert len(pieces) == stream_transfers.WINDOW_PARTS  # the reader has read none of them
    while len(port.receiver.held) < 8:
        count = len(port.receiver.pieces)
        port.receiver.held[count - stream_transfers.WINDOW_PARTS]()
        port.receiver.wait(min(8, count + 1))
    sender.join(LONG)
    assert b"".join(each[2] for each in pieces) == sent.tobytes()
    assert port.receiver.more == [True] * 7 + [False]


def test_transfers_with_credit_take_turns_chunk_by_chunk() -> None:
    queue = SendQueue()
    ended = Ended()
    for feed in range(1, 5):
        queue.add(5, feed, BufferContents(as_views([content(3 * CHUNK_BYTES)])), ended)
    for number in (1, 2, 4):
        queue.credit(number, 3)
    first = [queue.take(0) for _ in range(4)]
    queue.credit(3, 1)
    rest = [queue.take(0) for _ in range(6)]
    order = [(transfer.feed, index) for transfer, index in filter(None, (*first, *rest))]
    assert order == [(1, 0), (2, 0), (4, 0), (1, 1), (2, 1), (4, 1), (1, 2), (3, 0), (2, 2), (4, 2)]
    assert queue.take(0) is None  # transfer 3 has no more credit


def test_a_transfer_is_over_only_when_nobody_reads_its_contents() -> None:
    queue, ended = SendQueue(), Ended()
    queue.add(5, 1, BufferContents(as_views([content(CHUNK_BYTES)])), ended)
    queue.credit(1, 1)
    taken = queue.take(0)
    assert taken is not None
    queue.close(OSError("gone"))
    assert not ended.is_set
    queue.written(taken[0])
    assert str(ended.wait()) == "gone"


@pytest.mark.parametrize("port", [3 * CHUNK_BYTES], indirect=True)
def test_what_finds_no_room_waits_and_takes_none_from_others(port: Port) -> None:
    first = port.start(1, 2 * CHUNK_BYTES)
    assert first.wait() is None
    later = port.start(2, 2 * CHUNK_BYTES)
    port.channel.send(5, 3, [b"small"])  # is not held up
    assert (5, 3) in port.wait(2)
    assert not later.is_set
    assert port.inbox.statistics().waiting == 1
    _, done = port.inbox.take(5, 1)
    done()
    assert later.wait() is None
    assert port.inbox.statistics().waiting == 0


@pytest.mark.parametrize("port", [3 * CHUNK_BYTES], indirect=True)
def test_a_launch_larger_than_the_bound_gets_all_of_its_feeds(port: Port) -> None:
    of_first = [port.start(feed, 2 * CHUNK_BYTES, launch=1) for feed in (1, 2, 3)]
    of_second = port.start(4, 2 * CHUNK_BYTES, launch=4)
    assert [each.wait() for each in of_first] == [None] * 3
    assert not of_second.is_set
    for feed in (1, 2, 3):
        port.inbox.take(5, feed)
    assert of_second.wait() is None


@pytest.mark.parametrize("port", [CHUNK_BYTES], indirect=True)
def test_a_client_that_claims_one_launch_for_all_its_feeds_cannot_fill_the_memory(port: Port) -> None:
    port.has_memory = False
    transfers = [port.start(feed, CHUNK_BYTES, launch=1) for feed in range(1, 9)]
    port.wait(8)
    assert port.inbox.nbytes == CHUNK_BYTES
    first, *others = [each.wait() for each in transfers]
    assert first is None
    for error in others:
        assert isinstance(error, StatusError)
        assert error.status.code == Code.RESOURCE_EXHAUSTED
        assert "too little memory left" in error.status.message
    for feed in range(1, 9):
        port.inbox.drop(5, feed)
    assert port.start(9, CHUNK_BYTES, launch=9).wait() is None


def test_what_a_parked_plan_awaits_never_waits_for_room() -> None:
    inbox = Inbox(lambda *_: None, max_bytes=100)
    granted: list[int] = []
    feeds = [HOST_FEEDS.start + i for i in range(3)]
    for feed in feeds:
        inbox.admit(1, feed, 90, 0, lambda feed=feed: granted.append(feed))
    assert granted == feeds[:1]
    assert not inbox.await_all(1, [feeds[2]], lambda: None)
    assert granted == [feeds[0], feeds[2]]
    inbox.put(1, feeds[0], b"x" * 90)
    inbox.put(1, feeds[2], b"x" * 90)
    inbox.take(1, feeds[0])
    inbox.take(1, feeds[2])
    assert granted == [feeds[0], feeds[2], feeds[1]]
    inbox.withdraw(1, feeds[1])
    assert inbox.nbytes == 0


@pytest.mark.parametrize("port", [CHUNK_BYTES], indirect=True)
def test_what_waits_for_room_when_its_session_ends_holds_nobody_up(port: Port) -> None:
    assert port.start(1, CHUNK_BYTES).wait() is None
    later = port.start(2, CHUNK_BYTES)
    until(lambda: port.inbox.statistics().waiting == 1)
    port.port.close_session(5)
    assert isinstance(later.wait(), OSError)
    port.inbox.drop_session(5)
    until(lambda: port.inbox.statistics() == inboxes.InboxStatistics(0, 0, 0, 0))


@pytest.mark.parametrize("port", [8 * CHUNK_BYTES], indirect=True)
def test_memory_stays_bounded_while_more_than_the_bound_is_sent(port: Port) -> None:
    most = 0
    transfers = [port.start(feed, 4 * CHUNK_BYTES, launch=feed) for feed in range(1, 17)]
    for feed in range(1, 17):
        until(lambda feed=feed: (5, feed) in port.arrived)  # type: ignore[misc]
        most = max(most, port.inbox.nbytes)
        assert bytes(port.inbox.take(5, feed)[0]) == content(4 * CHUNK_BYTES, feed).tobytes()
    assert [each.wait() for each in transfers] == [None] * 16
    assert 4 * CHUNK_BYTES <= most <= 8 * CHUNK_BYTES


def test_a_file_goes_in_chunks_and_one_that_is_shortened_fails_alone(port: Port) -> None:
    nbytes = 3 * CHUNK_BYTES + 9
    descriptor = os.memfd_create("test")
    os.write(descriptor, content(nbytes).tobytes())
    port.channel.send_contents(5, 1, FileContents(nbytes, descriptor))
    port.wait(1)
    assert bytes(port.inbox.take(5, 1)[0]) == content(nbytes).tobytes()
    os.ftruncate(descriptor, 2 * CHUNK_BYTES)
    ended = Ended()
    port.channel.start(5, 2, FileContents(nbytes, descriptor), ended)
    error = ended.wait()
    assert isinstance(error, StatusError)
    assert error.status.code == Code.DATA_LOSS
    port.wait(2)
    with pytest.raises(StatusError, match="shortened"):
        port.inbox.take(5, 2)
    os.close(descriptor)
    port.channel.send(5, 3, [content(CHUNK_BYTES)])  # the channel continues
    port.wait(3)
    assert port.inbox.nbytes == CHUNK_BYTES


def test_a_host_without_memory_fails_the_one_piece_by_name(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(nbytes: int) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr(RECEIVE_BUFFERS, "take", take)
    with pytest.raises(StatusError, match="no memory for a piece"):
        port.channel.send(5, 1, [content(CHUNK_BYTES)])
    port.wait(1)
    with pytest.raises(StatusError, match="no memory for a piece"):
        port.inbox.take(5, 1)
    monkeypatch.undo()
    port.channel.send(5, 2, [content(CHUNK_BYTES)])
    port.wait(2)
    assert port.inbox.nbytes == CHUNK_BYTES


# ---- ends in the middle


@pytest.mark.parametrize("which", ["the channel's own", "a stream"])
@pytest.mark.parametrize("port", [2 * CHUNK_BYTES], indirect=True)
def test_a_connection_that_breaks_fails_what_is_under_way_and_frees_its_room(port: Port, which: str) -> None:
    port.channel.send(5, 1, [content(CHUNK_BYTES)])
    until(lambda: streams_of(port.channel) == STREAMS)
    held = port.start(2, CHUNK_BYTES)
    assert held.wait() is None
    under_way = [port.start(feed, 2 * CHUNK_BYTES) for feed in (3, 4)]
    engine = port.channel._streams
    assert engine is not None
    (port.channel._socket if which == "the channel's own" else engine._streams[0]).shut_down()
    for each in under_way:
        assert isinstance(each.wait(), OSError)
    assert port.receiver.join() is None
    until(lambda: port.inbox.statistics() == inboxes.InboxStatistics(1, 2, 2 * CHUNK_BYTES, 0))
    with pytest.raises(ConnectionError):
        port.channel.send(5, 9, [content(CHUNK_BYTES)])


def test_a_peer_that_goes_silent_is_named_and_what_is_under_way_fails() -> None:
    mine, theirs = tcp_pair()  # nobody reads the other end
    channel = DataChannel(mine)
    assert channel.liveness is not None
    channel.liveness.patience = 2.5  # more than two probes
    receiver = Receiver(channel)
    began = time.monotonic()
    with pytest.raises(OSError, match="the other side was silent"):
        channel.send(1, 2, [content(CHUNK_BYTES)])
    assert time.monotonic() - began < LONG
    assert isinstance(receiver.join(), TimeoutError)
    channel.close()
    theirs.close()


def test_a_peer_that_lives_is_waited_for_however_long_it_has_no_room() -> None:
    a, b = map(DataChannel, tcp_pair())
    assert a.liveness is not None
    a.liveness.patience = 1.5
    grants: list[Callable[[], None]] = []

    class Later:
        def admit(self, piece: Piece, launch: int, grant: Callable[[], None], refuse: Refuse) -> None:
            grants.append(grant)

        def withdraw(self, piece: Piece) -> None:
            pass

    threading.Thread(target=b.receive, args=(lambda *_: None, None, None, Later()), daemon=True).start()
    back, ended = Receiver(a), Ended()
    a.start(1, 2, BufferContents(as_views([content(CHUNK_BYTES)])), ended)
    time.sleep(4.0)
    assert not ended.is_set
    grants[0]()
    assert ended.wait() is None
    a.close()
    back.join()
    b.close()


@pytest.mark.parametrize("kind", ["tcp", "unix", "file"])
def test_a_piece_that_is_announced_while_another_thread_closes_the_channel_leaves_nothing(kind: str) -> None:
    a, b = map(DataChannel, tcp_pair() if kind == "tcp" else socket.socketpair())
    inbox = Inbox(lambda *_: None, 2 * CHUNK_BYTES)
    inbox.put(1, 1, content(2 * CHUNK_BYTES))

    class ClosedFirst:
        def admit(self, piece: Piece, launch: int, grant: Callable[[], None], refuse: Refuse) -> None:
            b.close()
            inbox.admit(1, piece.feed, piece.nbytes, launch, grant, piece=piece)

        def withdraw(self, piece: Piece) -> None:
            inbox.withdraw(1, piece.feed, piece)

    receiver = threading.Thread(target=b.receive, args=(lambda *_: None, None, None, ClosedFirst()), daemon=True)
    receiver.start()
    if kind == "file":
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, CHUNK_BYTES)
        a.send_contents(1, HOST_FEEDS.start, FileContents(CHUNK_BYTES, descriptor))
        os.close(descriptor)
    else:
        a.start_in_chunks(1, HOST_FEEDS.start, BufferContents(as_views([content(CHUNK_BYTES)])), Ended())
    receiver.join(LONG)
    assert not receiver.is_alive()
    inbox.drop(1, 1)
    assert inbox.statistics() == inboxes.InboxStatistics(1, 0, 0)
    a.close()


def test_small_pieces_that_a_broken_channel_may_have_lost_are_named() -> None:
    mine, theirs = tcp_pair()
    channel = DataChannel(mine)
    assert channel.liveness is not None
    for feed in (3, 4):
        channel.send(1, feed, [b"small"])
    assert channel.liveness.unconfirmed() == [(1, 3), (1, 4)]
    receiver, reader = Receiver(channel), Receiver(peer := DataChannel(theirs))
    reader.wait(2)
    until(lambda: not channel.liveness.unconfirmed())  # type: ignore[union-attr]
    channel.close()
    receiver.join()
    reader.join()
    peer.close()


def test_probes_are_no_progress_whether_or_not_they_are_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = tcp_pair()
    channel = DataChannel(mine)
    liveness = channel.liveness
    assert liveness is not None
    channel.send(1, 2, [b"small"])
    until(lambda: channel._socket.acknowledged() >= channel._socket.bytes_out)
    before = liveness.progress()
    for _ in range(3):  # the machine is there, and nobody reads
        liveness.probe()
        until(lambda: channel._socket.acknowledged() >= channel._socket.bytes_out)
        assert liveness.progress() == before
    acknowledged = channel._socket.acknowledged()
    monkeypatch.setattr(channel._socket, "acknowledged", lambda: acknowledged)
    for _ in range(3):  # the link was cut
        liveness.probe()
        assert liveness.progress() == before
    monkeypatch.undo()
    channel.send(1, 3, [b"small"])
    until(lambda: liveness.progress() != before)
    channel.close()
    theirs.close()
