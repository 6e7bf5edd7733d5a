"""Tests of data ports: which peers are admitted, and what happens to connections that do not complete their
handshake.
"""

from __future__ import annotations

import contextlib
import queue
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import AtollError, Code, StatusError
from atoll.peers import listener
from atoll.peers.data_port import DataPort
from atoll.protocol.number_ranges import CALL_FEEDS, CLIENT_FEEDS, HOST_FEEDS, SCRIPT_FEEDS, SPILL_FEEDS
from atoll.protocol.script_secrets import script_secret
from atoll.transfers.channel import DataChannel, Open
from atoll.transfers.inbox import MAX_INBOX_BYTES, Inbox
from atoll.transfers.piece_contents import BufferContents
from atoll.transfers.shared_memory_engine import BlockReturned
from atoll.transfers.socket_engine import SocketPiece
from atoll.transfers.stream_transfers import StreamPiece
from atoll.transfers.streams import MAX_STREAMS
from atoll.transfers.transfer_engine import Piece
from atoll.wire.address import Address
from atoll.wire.pending_connections import MAX_PER_ADDRESS, PendingConnections
from atoll.wire.sockets import dial
from tests.conftest import gone
from tests.transfers.ends import SECONDS, Receiver, content, descriptors, frame, is_closed, streams_of
from tests.waiting import until

SCRIPT = script_secret("secret five")  # of session 5


@pytest.fixture
def port(
    short_directory: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[DataPort, list[tuple[int, int]], threading.Condition]]:
    """Return a worker's data port and its received contents. It holds at most `request.param` bytes per session."""
    arrived: list[tuple[int, int]] = []
    changed = threading.Condition()

    def on_arrival(session: int, feed: int) -> None:
        with changed:
            arrived.append((session, feed))
            changed.notify()

    inbox = Inbox(on_arrival, getattr(request, "param", MAX_INBOX_BYTES))
    data_port = DataPort(Address(path=str(short_directory / "data")), inbox)
    yield data_port, arrived, changed
    data_port.close()


def opened(port: DataPort, session: int, secret: str) -> DataChannel:
    channel = DataChannel.dial(port.address)
    channel.open(session, secret)
    return channel


def test_the_secret_of_a_session_opens_its_own_feeds_and_no_other(port):
    data_port, arrived, changed = port
    data_port.open_session(5, "secret five")
    data_port.open_session(6, "secret six")
    channel = opened(data_port, 5, "secret five")
    channel.send(6, 1, [b"mine"])  # naming another session does not help
    with changed:
        assert changed.wait_for(lambda: arrived, SECONDS)
    assert arrived == [(5, 1)]
    got, _ = data_port.inbox.take(5, 1)
    assert bytes(got) == b"mine"
    assert data_port.inbox.nbytes == 0
    channel.close()


@pytest.mark.parametrize("opening", [Open(5, "guess"), Open(5, ""), Open(0, ""), Open(0, "secret five")])
def test_a_wrong_secret_is_refused(port, opening, monkeypatch):
    monkeypatch.setattr("atoll.peers.data_port.NEWS_SECONDS", 0.1)
    data_port, arrived, _ = port
    data_port.open_session(5, "secret five")
    data_port.set_peers((), "between hosts")
    with dial(data_port.address) as sock:
        sock.settimeout(SECONDS)
        sock.sendall(frame(opening) + frame(SocketPiece(5, 1, 2), b"in"))
        assert is_closed(sock)
    assert arrived == []


@pytest.mark.parametrize("sent", [b"\xff" * 8, frame(BlockReturned(1)), b"GET / HTTP/1.1\r\n\r\n"])
def test_who_does_not_open_a_data_port_properly_is_refused(port, sent):
    with dial(port[0].address) as sock:
        sock.settimeout(SECONDS)
        sock.sendall(sent)
        assert is_closed(sock)


def test_the_clusters_own_secret_opens_every_sessions_feeds(port):
    data_port, arrived, changed = port
    data_port.set_peers(((0, str(data_port.address)),), "between hosts")
    data_port.to_host(0).send(9, 4, [b"from a host"])
    with changed:
        assert changed.wait_for(lambda: arrived, SECONDS)
    assert arrived == [(9, 4)]
    data_port.to_host(0).close()


@pytest.mark.parametrize("port", [100], indirect=True)
def test_too_much_for_one_session_does_not_end_the_connection_that_all_sessions_share(port):
    data_port, arrived, changed = port
    data_port.set_peers(((0, str(data_port.address)),), "between hosts")
    peer = data_port.to_host(0)
    for feed in (HOST_FEEDS.start, HOST_FEEDS.start + 1):
        peer.send(9, feed, [content(1000)])
    peer.send(8, 4, [b"another session's"])
    with changed:
        assert changed.wait_for(lambda: arrived, SECONDS)
    assert arrived == [(8, 4)]
    assert len(data_port.inbox.take(9, HOST_FEEDS.start)[0]) == 1000
    with pytest.raises(StatusError) as raised:
        data_port.inbox.take(9, HOST_FEEDS.start + 1)
    assert raised.value.status.code == Code.RESOURCE_EXHAUSTED
    peer.close()


def test_closing_a_session_frees_what_waits_for_it(port):
    data_port, arrived, changed = port
    data_port.open_session(5, "secret five")
    channel = opened(data_port, 5, "secret five")
    channel.send(5, 1, [content(1000)])
    with changed:
        assert changed.wait_for(lambda: arrived, SECONDS)
    assert data_port.inbox.nbytes == 1000
    data_port.close_session(5)
    assert is_closed(channel._socket._socket)
    data_port.inbox.drop_session(5)  # with its store, in the session's order
    assert data_port.inbox.nbytes == 0
    channel.close()


def test_closing_a_session_frees_its_shared_memory(port):
    data_port, _, _ = port
    data_port.open_session(5, "secret five")
    before = descriptors()
    channel = opened(data_port, 5, "secret five")
    data_port.to_proxy(5).send(5, 1, [content(1_000_000)])
    assert data_port.statistics().channels[5].engines["SharedMemoryEngine"].nbytes > 0
    data_port.close_session(5)
    channel.close()
    assert not gone(lambda: [*range(descriptors() > before)])
    assert data_port.statistics().channels == {}


def test_a_sessions_second_channel_takes_the_place_of_its_first(port):
    data_port, _, _ = port
    data_port.open_session(5, "secret five")
    first = opened(data_port, 5, "secret five")
    before = data_port.to_proxy(5)
    second = opened(data_port, 5, "secret five")
    assert is_closed(first._socket._socket)
    assert not gone(lambda: [*range(data_port.to_proxy(5) is before)])
    first.close()
    second.close()


@pytest.mark.parametrize("feed", [-1, CLIENT_FEEDS.stop, SCRIPT_FEEDS.start, SPILL_FEEDS.start, HOST_FEEDS.start])
def test_a_client_cannot_send_a_feed_with_a_number_that_others_choose(port, feed: int):
    """The worker would keep any number of such feeds, because it reports only those of clients to the controller."""
    data_port, arrived, _ = port
    data_port.open_session(5, "secret five")
    for sent in (frame(SocketPiece(5, feed, 0)), frame(SocketPiece(5, feed, 2), b"in")):
        channel = opened(data_port, 5, "secret five")
        channel._socket._socket.sendall(sent)
        assert is_closed(channel._socket._socket)
        channel.close()
    assert (arrived, data_port.inbox.statistics().feeds) == ([], 0)


# ---- connections that do not open


def serves(data_port: DataPort, session: int) -> bool:
    """Return whether an honest client is served."""
    data_port.open_session(session, "secret")
    channel = opened(data_port, session, "secret")
    found = not data_port.to_proxy(session).is_closed
    channel.close()
    return found


def test_connections_that_do_not_open_are_few_and_delay_no_other(port):
    data_port, _, _ = port
    socks = [dial(data_port.address) for _ in range(2 * MAX_PER_ADDRESS)]
    for sock in socks:
        sock.settimeout(SECONDS)
    assert all(is_closed(sock) for sock in socks[:MAX_PER_ADDRESS])
    assert serves(data_port, 5)

    def too_many() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == "atoll-data"][MAX_PER_ADDRESS + 1 :]

    assert gone(too_many) == []
    for sock in socks:
        sock.close()


def test_who_waits_for_a_session_that_never_opens_is_closed_for_others(port):
    data_port, _, _ = port
    socks = [dial(data_port.address) for _ in range(MAX_PER_ADDRESS)]
    for sock in socks:
        sock.settimeout(SECONDS)
        sock.sendall(frame(Open(1 << 40, "a session that never opens")))
    others = [dial(data_port.address) for _ in range(MAX_PER_ADDRESS)]
    assert all(is_closed(sock) for sock in socks)
    for sock in (*socks, *others):
        sock.close()


def test_a_connection_that_does_not_open_in_time_is_closed(short_directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "PendingConnections", lambda: PendingConnections(seconds=0.2))
    data_port = DataPort(Address(path=str(short_directory / "data")), Inbox(lambda *_: None))
    with dial(data_port.address) as sock:
        sock.settimeout(SECONDS)
        sock.sendall(frame(Open(1, "x"))[:-3])
        assert is_closed(sock)
    data_port.open_session(5, "secret")
    channel = opened(data_port, 5, "secret")
    assert not data_port.to_proxy(5).is_closed
    time.sleep(0.4)
    channel.send(5, 1, [b"opened in time"])
    assert not data_port.to_proxy(5).is_closed
    channel.close()
    data_port.close()


def test_a_lack_of_descriptors_does_not_end_the_port(port, caplog: pytest.LogCaptureFixture):
    data_port, _, _ = port
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, limits[1]))
            sock.connect(data_port.address.path)
            assert not gone(lambda: [] if "no connection can be accepted" in caplog.text else ["no report"])
            time.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caplog.text.count("no connection can be accepted") == 1, "it is reported once, not at each attempt"
        assert serves(data_port, 5)
        data_port.open_session(6, "secret six")
        sock.sendall(frame(Open(6, "secret six")))
        assert not data_port.to_proxy(6).is_closed, "it has waited to be accepted"


def test_a_connection_of_which_no_channel_can_be_made_does_not_end_the_port(
    port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fails(*_: object) -> DataChannel:
        raise OSError("it was reset")

    data_port, _, _ = port
    monkeypatch.setattr(listener, "DataChannel", fails)
    with dial(data_port.address) as sock:
        sock.settimeout(SECONDS)
        assert is_closed(sock)
    assert "a data connection cannot be served: it was reset" in caplog.text
    monkeypatch.undo()
    assert serves(data_port, 5)


def test_what_a_host_of_an_earlier_incarnation_has_opened_is_closed_and_no_other(port):
    data_port, arrived, changed = port
    data_port.set_peers((), "mine", frozenset({"mine", "first", "second"}))
    first, second = opened(data_port, 0, "first"), opened(data_port, 0, "second")
    for feed, channel in enumerate((first, second)):
        channel.send(9, feed, [b"from a host"])
    with changed:
        assert changed.wait_for(lambda: len(arrived) == 2, SECONDS)
    data_port.set_peers((), "mine", frozenset({"mine", "first", "second anew"}))

    def read() -> None:
        with contextlib.suppress(OSError, EOFError, AtollError):
            second.receive(lambda *_: None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(SECONDS)
    assert not reader.is_alive(), "nobody has closed it"
    first.send(9, 7, [b"still"])
    with changed:
        assert changed.wait_for(lambda: len(arrived) == 3, SECONDS)
    first.close()
    second.close()


def test_a_host_that_dials_before_the_secret_between_hosts_is_known_is_waited_for(port):
    data_port, arrived, changed = port
    channel = opened(data_port, 0, "between hosts")
    channel.send(9, 4, [b"from a host"])
    with changed:
        assert not changed.wait_for(lambda: arrived, 0.1)
    data_port.set_peers((), "between hosts")
    with changed:
        assert changed.wait_for(lambda: arrived, SECONDS)
    assert arrived == [(9, 4)]
    channel.close()


def test_a_stream_that_is_admitted_before_its_channel_waits_for_it() -> None:
    data_port = DataPort(Address(host="127.0.0.1"), Inbox(lambda *_: None))
    data_port.open_session(5, "secret")
    stream, channel = (DataChannel.dial(data_port.address) for _ in range(2))
    stream.send_opening(Open(5, "secret", "its name", "receives"))
    time.sleep(0.2)  # as if both had waited for the session to be known, and the stream's thread were the first
    channel.open(5, "secret", "its name")
    admitted = data_port.to_proxy(5)
    assert not gone(lambda: [] if streams_of(admitted) == 1 else ["no stream"])
    for each in (stream, channel):
        each.close()
    data_port.close()


def test_few_streams_of_a_session_wait_for_a_channel(port) -> None:
    data_port, _, _ = port
    data_port.open_session(5, "secret five")
    data_port.open_session(6, "secret six")
    streams = [DataChannel.dial(data_port.address) for _ in range(2 * MAX_STREAMS)]
    for stream in streams:
        stream.send_opening(Open(5, "secret five", "no channel", "sends"))
    waiting = [each for each in streams if not closes_within(each, 0.0)]
    until(lambda: sum(closes_within(each, 0.0) for each in streams) == MAX_STREAMS)
    assert len(waiting) >= MAX_STREAMS
    other = DataChannel.dial(data_port.address)
    other.send_opening(Open(6, "secret six", "no channel", "sends"))
    assert not closes_within(other, 0.1)
    for stream in (other, *streams):
        stream.close()


def closes_within(channel: DataChannel, seconds: float) -> bool:
    """Return whether the other side has closed the channel, or does so within some time."""
    sock = channel._socket._socket
    return bool(select.select([sock], [], [], seconds)[0]) and is_closed(sock)


LARGE = 300_000  # bytes of a transfer whose end is confirmed


class Unread:
    """Replies of a host that expects none, with the feeds reported to the session."""

    def __init__(self) -> None:
        self.feeds: list[tuple[int, int]] = []
        self.awaited: set[int] = set()
        self.nbytes: list[int] = []  # of pieces that were passed to it

    def awaits(self, session: int, feed: int, nbytes: int) -> bool:
        return feed in self.awaited

    def takes(self, feed: int) -> bool:
        return feed in CALL_FEEDS

    def answered(self, session: int, feed: int, content: Any, done: Callable[[], None]) -> None:
        self.nbytes.append(len(memoryview(content).cast("B")))
        done()

    def fail(self, session: int) -> None:
        pass

    def channel(self, session: int, proxy: DataChannel) -> DataChannel:
        return proxy

    def unread(self, session: int, feed: int) -> None:
        self.feeds.append((session, feed))


@contextlib.contextmanager
def between_machines() -> Iterator[tuple[DataPort, Unread, list[tuple[int, int]]]]:
    """Return a TCP port that admits session 5, and its received contents."""
    arrived: list[tuple[int, int]] = []
    answers = Unread()
    data_port = DataPort(Address(host="127.0.0.1"), Inbox(lambda *which: arrived.append(which)), answers=answers)
    data_port.open_session(5, "secret five")
    try:
        yield data_port, answers, arrived
    finally:
        data_port.close()


def test_a_proxy_learns_that_a_host_takes_requests_for_arrays() -> None:
    with between_machines() as (data_port, _, _):
        channel = DataChannel.connect(data_port.address, 5, "secret five")
        receiver = Receiver(channel)
        until(lambda: channel.takes_reads)
        data_port.close_session(5)
        receiver.join()
        channel.close()


def test_a_proxy_requests_no_arrays_from_a_host_that_calls_no_clients() -> None:
    data_port = DataPort(Address(host="127.0.0.1"), Inbox(lambda *which: None))
    data_port.open_session(5, "secret five")
    channel = DataChannel.connect(data_port.address, 5, "secret five")
    receiver = Receiver(channel)
    data_port.to_proxy(5)  # waits until the channel is open
    data_port.close_session(5)
    receiver.join()
    assert not channel.takes_reads
    channel.close()
    data_port.close()


def dialed_by_script(data_port: DataPort) -> tuple[DataChannel, Receiver]:
    channel = DataChannel.connect(data_port.address, 5, SCRIPT)
    receiver = Receiver(channel)
    until(lambda: data_port.send_to_script(5, 1, [BufferContents((memoryview(content(LARGE)),))]))
    receiver.wait(1)
    receiver.pieces.clear()
    return channel, receiver


def test_large_contents_are_sent_on_the_channel_that_the_clients_process_has_opened() -> None:
    with between_machines() as (data_port, answers, _):
        parts = [BufferContents((memoryview(content(LARGE, seed)),)) for seed in (1, 2)]
        assert not data_port.send_to_script(5, 8, parts)
        channel, receiver = dialed_by_script(data_port)
        assert data_port.send_to_script(5, 8, parts)
        small = BufferContents((memoryview(b"whose arrival nobody confirms"),))
        assert not data_port.send_to_script(5, 9, [parts[0], small])
        assert [feed for _, feed, _ in receiver.wait(2)] == [8, 8]
        assert b"".join(each for _, _, each in receiver.pieces) == content(LARGE, 1).tobytes() + bytes(
            content(LARGE, 2)
        )
        assert receiver.more[-2:] == [True, False]
        assert answers.feeds == []
        channel.close()
        receiver.join()


def test_the_clients_process_sends_large_contents_of_its_session() -> None:
    with between_machines() as (data_port, _, arrived):
        channel, receiver = dialed_by_script(data_port)
        landed: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        whole = content(LARGE)
        channel.start_in_chunks(0, 7, BufferContents((memoryview(whole),)), landed.put)
        assert landed.get(timeout=SECONDS) is None
        until(lambda: arrived)
        assert arrived == [(5, 7)]
        assert bytes(data_port.inbox.take(5, 7)[0]) == whole.tobytes()
        channel.close()
        receiver.join()


def test_the_session_learns_which_contents_a_lost_channel_of_the_clients_process_has_lost() -> None:
    with between_machines() as (data_port, answers, _):
        channel, receiver = dialed_by_script(data_port)
        held = data_port._scripts[5]
        channel.close()
        receiver.join()
        until(lambda: held.is_closed)
        data_port._scripts[5] = held  # as for a send that has just started
        assert data_port.send_to_script(5, 8, [BufferContents((memoryview(content(LARGE)),))])
        assert answers.feeds == [(5, 8)]


def test_the_secret_of_the_clients_process_opens_no_channel_of_its_proxy() -> None:
    with between_machines() as (data_port, _, _):
        proxy = DataChannel.connect(data_port.address, 5, "secret five")
        of_proxy = data_port.to_proxy(5)
        channel, receiver = dialed_by_script(data_port)
        assert data_port.to_proxy(5) is of_proxy
        assert not of_proxy.is_closed
        data_port.close_session(5)
        assert receiver.join() is None, "it was closed with its session"
        channel.close()
        proxy.close()


@pytest.mark.parametrize(
    ("secret", "piece", "words"),
    [
        (
            "secret five",
            StreamPiece(5, CALL_FEEDS.start + 1, 1 << 30, transfer=1),
            "an answer of a call was announced like a feed",
        ),
        (SCRIPT, StreamPiece(5, CALL_FEEDS.start + 1, 1 << 30, transfer=1), "this channel carries only feeds"),
        (SCRIPT, SocketPiece(5, CALL_FEEDS.start + 1, 8 << 30), "this channel carries only feeds"),
        (SCRIPT, SocketPiece(5, CALL_FEEDS.start, 1), "this channel carries only feeds"),
    ],
)
def test_an_answer_whose_memory_nobody_bounds_ends_its_channel(
    secret: str, piece: Piece, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The frame is rejected before its memory is allocated, and before any byte of the reply arrives."""
    with between_machines() as (data_port, _, _):
        channel = DataChannel.connect(data_port.address, 5, secret)
        receiver = Receiver(channel)
        channel._socket.send(piece)
        try:
            assert receiver.join() is None
            until(lambda: words in caplog.text)
        finally:
            channel.close()


def test_a_large_answer_that_no_call_awaits_is_dropped_as_it_arrives() -> None:
    with between_machines() as (data_port, answers, arrived):
        channel = DataChannel.connect(data_port.address, 5, "secret five")
        receiver = Receiver(channel)
        feed, nbytes = CALL_FEEDS.start + 1, (3 << 20) + 1
        answers.awaited.add(feed + 1)
        channel.send(5, feed, [bytes(nbytes)])
        channel.send(5, feed + 1, [bytes(nbytes)])
        channel.send(5, feed + 2, [bytes(100)])
        channel.send(5, 17, [b"a feed"])
        until(lambda: arrived == [(5, 17)])
        assert answers.nbytes == [nbytes, 100]
        channel.close()
        receiver.join()
