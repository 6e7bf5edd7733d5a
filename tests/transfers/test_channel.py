"""The data port's protocol over socket pairs, with one end in hand where a peer misbehaves."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import Code, ConnectError, Status, StatusError
from atoll.protocol.messages import OWN_NUMBERS
from atoll.transfers import channel as data
from atoll.transfers.channel import SHARED_THRESHOLD, DataChannel, Open, Piece, Recycle, aligned, dial
from atoll.transfers.data_port import DataPort, Inbox
from atoll.wire.address import Address
from tests.conftest import gone as still_there

SECONDS = 5.0
Ends = tuple[DataChannel, DataChannel]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _no_descriptor_leaks() -> Iterator[None]:
    before = descriptors()
    yield
    # Threads of a data port close their ends in their own time.
    found = still_there(lambda: ["descriptors"] if descriptors() > before else [])
    assert not found, f"{descriptors() - before} descriptors more than before"


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with contextlib.ExitStack() as stack:
        pair = socket.socketpair() if request.param == "unix" else tcp_pair()
        channels = DataChannel(pair[0]), DataChannel(pair[1])
        for channel in channels:
            stack.callback(channel.close)
        yield channels


@pytest.fixture
def unix_ends() -> Iterator[Ends]:
    a, b = map(DataChannel, socket.socketpair())
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, DataChannel]]:
    """A bare socket, and the channel at its other end."""
    mine, theirs = socket.socketpair()
    mine.settimeout(SECONDS)
    channel = DataChannel(theirs)
    yield mine, channel
    mine.close()
    channel.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


class Receiver:
    """Reads a channel on a thread to its end."""

    def __init__(self, channel: DataChannel, recycle: bool = True) -> None:
        self.channel = channel
        self.recycle = recycle
        self.pieces: list[tuple[int, int, bytes]] = []
        self.more: list[bool] = []
        self.held: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.channel.receive(self._take)
        except Exception as error:
            self.error = error.with_traceback(None)  # or its frames keep what they held

    def _take(self, piece: Piece, content: Any, done: Callable[[], None]) -> None:
        with self._changed:
            self.pieces.append((piece.session, piece.feed, bytes(content)))
            self.more.append(piece.more)
            if self.recycle:
                done()
            else:
                self.held.append(done)
            self._changed.notify()

    def wait(self, count: int) -> list[tuple[int, int, bytes]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.pieces) >= count, SECONDS)
            return self.pieces

    def join(self) -> BaseException | None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.error


def content(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def received(raw: tuple[socket.socket, DataChannel], *frames: bytes) -> Receiver:
    """What becomes of a peer that sends these bytes and goes."""
    mine, channel = raw
    for each in frames:
        mine.sendall(each)
    mine.shutdown(socket.SHUT_WR)
    receiver = Receiver(channel)
    receiver.join()
    return receiver


def frame(message: Any, payload: bytes = b"") -> bytes:
    header = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(header)) + header + payload


# ---- pieces


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 70_000, SHARED_THRESHOLD - 1, SHARED_THRESHOLD, 3_000_000])
def test_a_piece_arrives_with_its_bytes_whatever_way_it_takes(ends, nbytes):
    sender, receiver = ends[0], Receiver(ends[1])
    sent = content(nbytes)
    sender.send(3, 17, [sent])
    assert receiver.wait(1) == [(3, 17, sent.tobytes())]
    sender.close()
    assert receiver.join() is None


def test_parts_are_joined_in_order(ends):
    sender, receiver = ends[0], Receiver(ends[1])
    parts = [b"ab", np.arange(3, dtype=np.int16), bytearray(), memoryview(b"z")]
    sender.send(1, 2, parts)
    big = [content(200_000, 1), content(200_000, 2)]
    sender.send(1, 3, big)
    expected = [b"ab\x00\x00\x01\x00\x02\x00z", big[0].tobytes() + big[1].tobytes()]
    assert [piece[2] for piece in receiver.wait(2)] == expected


@pytest.mark.parametrize("nbytes", [10, 2_000_000])
def test_bytes_are_written_straight_into_what_they_travel_in(ends, nbytes):
    sender, receiver = ends[0], Receiver(ends[1])
    sent = content(nbytes)

    def fill(target: memoryview) -> None:
        target[:] = sent

    sender.send_filled(1, 2, nbytes, fill)
    assert receiver.wait(1)[0][2] == sent.tobytes()


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1001, 900_000])
def test_a_large_buffer_travels_in_parts_of_which_the_last_says_so(ends, monkeypatch, nbytes):
    monkeypatch.setattr(data, "PART_BYTES", 1000 if nbytes < 10_000 else 300_000)
    sender, receiver = ends[0], Receiver(ends[1])
    sent = content(nbytes)
    sender.send_in_parts(1, 2, sent)
    sender.send(1, 3, [b"next"])
    count = max(1, -(-nbytes // data.PART_BYTES))
    pieces = receiver.wait(count + 1)
    assert b"".join(body for _, feed, body in pieces if feed == 2) == sent.tobytes()
    assert receiver.more == [True] * (count - 1) + [False, False]
    assert pieces[-1] == (1, 3, b"next")


def test_both_ends_send_at_the_same_time(ends):
    receivers = [Receiver(channel) for channel in ends]
    sent = content(400_000)

    def send(channel: DataChannel) -> None:
        for feed in range(20):
            channel.send(1, feed, [sent])

    threads = [threading.Thread(target=send, args=(channel,)) for channel in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for receiver in receivers:
        assert [piece[1] for piece in receiver.wait(20)] == list(range(20))
        assert all(piece[2] == sent.tobytes() for piece in receiver.pieces)


def test_many_threads_may_send_on_one_channel(ends):
    receiver = Receiver(ends[1])
    sizes = [10, 70_000, 300_000]

    def send(number: int) -> None:
        for i in range(15):
            ends[0].send(number, i, [content(sizes[(number + i) % 3], 100 * number + i)])

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for session, feed, got in receiver.wait(60):
        assert got == content(sizes[(session + feed) % 3], 100 * session + feed).tobytes()
    for thread in threads:
        thread.join(SECONDS)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 600_000), min_size=1, max_size=6))
def test_pieces_keep_their_order_whatever_their_sizes(sizes):
    a, b = map(DataChannel, socket.socketpair())
    receiver = Receiver(b)
    try:
        for feed, size in enumerate(sizes):
            a.send(1, feed, [bytes([feed]) * size])
        got = receiver.wait(len(sizes))
        assert [(feed, len(body), set(body)) for _, feed, body in got] == [
            (feed, size, {feed} if size else set()) for feed, size in enumerate(sizes)
        ]
    finally:
        a.close()
        receiver.join()
        b.close()


# ---- shared memory


def test_segments_are_used_again_once_they_have_been_read(unix_ends):
    sender, receiver = unix_ends[0], Receiver(unix_ends[1])
    back = Receiver(sender)  # reads what the receiver sends back
    before = descriptors()
    for feed in range(10):
        sender.send(1, feed, [content(1_000_000, feed)])
        receiver.wait(feed + 1)
    assert [piece[2] for piece in receiver.pieces] == [content(1_000_000, i).tobytes() for i in range(10)]
    # Whether a segment is back in time for the next piece is a race; that all of them are kept is not.
    assert descriptors() - before <= 10
    unix_ends[1].close()
    assert back.join() is None


def test_a_segment_is_not_written_over_while_it_is_read(unix_ends):
    sender = unix_ends[0]
    receiver = Receiver(unix_ends[1], recycle=False)
    sent = [content(500_000, i) for i in range(3)]
    for feed, each in enumerate(sent):
        sender.send(1, feed, [each])
    receiver.wait(3)
    numbers = {number for number in sender._pool._used}
    assert len(numbers) == 3, "three segments for three pieces that nobody has given back"
    assert [piece[2] for piece in receiver.pieces] == [each.tobytes() for each in sent]


def test_a_sender_waits_for_a_segment_and_then_gives_up(unix_ends, monkeypatch):
    monkeypatch.setattr(data, "_POOL_BYTES", 1 << 20)
    monkeypatch.setattr(data, "_SEGMENT_WAIT_SECONDS", 0.01)
    sender = unix_ends[0]
    receiver = Receiver(unix_ends[1], recycle=False)
    sender.send(1, 0, [content(500_000)])
    receiver.wait(1)
    with pytest.raises(TimeoutError, match="does not read"):
        sender.send(1, 1, [content(500_000)])
    returns = Receiver(sender)
    monkeypatch.setattr(data, "_SEGMENT_WAIT_SECONDS", SECONDS)
    receiver.held.pop()()
    sender.send(1, 1, [content(500_000, 1)])
    assert receiver.wait(2)[1][2] == content(500_000, 1).tobytes()
    unix_ends[1].close()
    returns.join()


def test_a_piece_larger_than_the_pool_still_gets_through(unix_ends, monkeypatch):
    monkeypatch.setattr(data, "_POOL_BYTES", 1 << 20)
    receiver = Receiver(unix_ends[1])
    unix_ends[0].send(1, 0, [content(3_000_000)])
    assert receiver.wait(1)[0][2] == content(3_000_000).tobytes()


def test_contents_that_cannot_be_written_give_their_segment_back(unix_ends):
    def fill(target: memoryview) -> None:
        raise ValueError("no such shard")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such shard"):
            unix_ends[0].send_filled(1, 2, SHARED_THRESHOLD, fill)
    assert unix_ends[0]._pool._used == {}
    assert len(unix_ends[0]._pool._free) == 1


# ---- files


@pytest.mark.parametrize("nbytes", [0, 5, 100_000])
def test_a_file_goes_by_its_descriptor_and_stays_as_it_is(unix_ends, short_directory: Path, nbytes):
    path = short_directory / "file"
    path.write_bytes(content(nbytes).tobytes() + b"and more")
    taken = []
    done = threading.Event()

    def take(piece: Piece, got: Any, finish: Callable[[], None]) -> None:
        if nbytes:
            got[0] += 1  # a private mapping: the array of it may be written over
        taken.append(bytes(got))
        done.set()

    thread = threading.Thread(target=unix_ends[1].receive, args=(take,), daemon=True)
    thread.start()
    with open(path, "rb") as file:
        unix_ends[0].send_file(1, 2, nbytes, file.fileno())
    assert done.wait(SECONDS)
    assert taken[0][1:] == content(nbytes).tobytes()[1:]
    assert path.read_bytes() == content(nbytes).tobytes() + b"and more"
    unix_ends[0].close()
    thread.join(SECONDS)


# ---- peers that misbehave


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack("<I", 1 << 21), "frame header"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "not a data frame"),
        (frame(["p", 1]), "not a data frame"),
        (frame(Open(1, "x")), "opened once"),
        (frame(Piece(1, 2, -1)), "a piece of -1 bytes"),
        (frame(Piece(1, 2, 1 << 50)), "a piece of"),
        (frame(Piece(1, 2, 10), b"short"), "inside a piece"),
        (frame(Piece(1, 2, 10, segment=-2)), "without its descriptor"),
        (frame(Piece(1, 2, 10, segment=0, segment_bytes=100)), "not known"),
        (frame(Piece(1, 2, 10, segment=-7)), "not known"),
    ],
)
def test_a_peer_that_sends_what_is_no_frame_is_named_and_left(raw, sent, reason):
    error = received(raw, frame(Piece(1, 1, 2), b"ok"), sent).error
    assert isinstance(error, ConnectError)
    assert reason in str(error)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_peer_that_goes_between_pieces_or_inside_a_header_has_just_gone(raw, cut):
    whole = frame(Piece(1, 1, 2), b"ok")
    receiver = received(raw, whole, frame(Piece(1, 2, 5))[:cut])
    assert receiver.error is None
    assert receiver.pieces == [(1, 1, b"ok")]


@pytest.mark.parametrize(
    ("piece", "size"),
    [
        (Piece(1, 2, 4), 10),  # a descriptor that nobody asked for
        (Piece(1, 2, 10, segment=-2), 5),  # a file that is too short
        (Piece(1, 2, 10, segment=0, segment_bytes=100), 50),
        (Piece(1, 2, 10, segment=0, segment_bytes=0), 50),
        (Piece(1, 2, 10, segment=0, segment_bytes=-5), 50),
        (Piece(1, 2, 60, segment=0, segment_bytes=50), 50),
        (Recycle(4), 10),
        (Open(1, "x"), 10),
    ],
)
def test_descriptors_of_a_peer_that_misbehaves_are_closed(raw, piece, size):
    mine, channel = raw
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, size)
    sent = frame(piece)
    before = descriptors()
    socket.send_fds(mine, [sent[:1]], [descriptor])
    receiver = received(raw, sent[1:])
    assert receiver.error is None or isinstance(receiver.error, ConnectError)
    channel.close()
    assert descriptors() == before - 1
    os.close(descriptor)


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_any_bytes_end_in_pieces_or_a_connect_error(junk):
    mine, theirs = socket.socketpair()
    channel = DataChannel(theirs)
    try:
        receiver = received((mine, channel), junk)
        assert receiver.error is None or isinstance(receiver.error, ConnectError)
    finally:
        mine.close()
        channel.close()


def test_the_first_frame_opens_the_channel(raw):
    mine, channel = raw
    mine.sendall(frame(Open(7, "secret")))
    assert channel.receive_open() == Open(7, "secret")
    mine.sendall(frame(Recycle(1)))
    with pytest.raises(ConnectError, match="first frame"):
        channel.receive_open()


def test_closing_ends_the_thread_that_reads(unix_ends):
    receiver = Receiver(unix_ends[0])
    unix_ends[0].close()
    assert receiver.join() is None
    assert unix_ends[0].is_closed


def test_nobody_at_a_data_port_is_told_with_the_address(short_directory: Path):
    with pytest.raises(ConnectError, match=f"unix:{short_directory}/none"):
        dial(Address(path=f"{short_directory}/none"))


def test_memory_for_pieces_is_aligned_for_a_cpu_device():
    for nbytes in (1, 63, 64, 100_000):
        memory = aligned(nbytes)
        assert memory.nbytes == nbytes
        assert memory.ctypes.data % 64 == 0


# ---- who may come in


@pytest.fixture
def port(short_directory: Path) -> Iterator[tuple[DataPort, list[tuple[int, int]], threading.Condition]]:
    """A worker's data port with what has arrived."""
    arrived: list[tuple[int, int]] = []
    changed = threading.Condition()

    def on_arrival(session: int, feed: int) -> None:
        with changed:
            arrived.append((session, feed))
            changed.notify()

    data_port = DataPort(Address(path=str(short_directory / "data")), Inbox(on_arrival))
    yield data_port, arrived, changed
    data_port._socket.shutdown(socket.SHUT_RDWR)
    data_port._socket.close()


def opened(port: DataPort, session: int, secret: str) -> DataChannel:
    channel = DataChannel(dial(port.address))
    channel.open(session, secret)
    return channel


def test_the_secret_of_a_session_opens_its_own_feeds_and_no_other(port):
    data_port, arrived, changed = port
    data_port.open_session(5, "secret five")
    data_port.open_session(6, "secret six")
    channel = opened(data_port, 5, "secret five")
    channel.send(6, 1, [b"mine"])  # it names another session: that does not help it
    with changed:
        assert changed.wait_for(lambda: arrived, SECONDS)
    assert arrived == [(5, 1)]
    got, _ = data_port.inbox.take(5, 1)
    assert bytes(got) == b"mine"
    assert data_port.inbox.nbytes == 0
    channel.close()


@pytest.mark.parametrize("opening", [Open(5, "guess"), Open(5, ""), Open(0, ""), Open(0, "secret five")])
def test_a_wrong_secret_is_refused(port, opening):
    data_port, arrived, _ = port
    data_port.open_session(5, "secret five")
    with dial(data_port.address) as sock:
        sock.settimeout(SECONDS)
        sock.sendall(frame(opening) + frame(Piece(5, 1, 2), b"in"))
        assert gone(sock)
    assert arrived == []


@pytest.mark.parametrize("sent", [b"\xff" * 8, frame(Recycle(1)), b"GET / HTTP/1.1\r\n\r\n"])
def test_who_does_not_open_a_data_port_properly_is_refused(port, sent):
    with dial(port[0].address) as sock:
        sock.settimeout(SECONDS)
        sock.sendall(sent)
        assert gone(sock)


def gone(sock: socket.socket) -> bool:
    """True once the other side has closed."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_clusters_own_secret_opens_every_sessions_feeds(port):
    data_port, arrived, changed = port
    data_port.set_peers(((0, str(data_port.address)),), "between hosts")
    data_port.to_host(0).send(9, 4, [b"from a host"])
    with changed:
        assert changed.wait_for(lambda: arrived, SECONDS)
    assert arrived == [(9, 4)]
    data_port.to_host(0).close()


def test_what_comes_for_a_session_that_is_over_is_not_kept():
    inbox, told = Inbox(lambda session, feed: None), []
    inbox.put(5, OWN_NUMBERS, b"before", lambda: told.append("before"))
    inbox.drop_session(5)
    inbox.put(5, OWN_NUMBERS + 1, b"after", lambda: told.append("after"))
    inbox.fail(5, [OWN_NUMBERS + 2], Status(Code.CANCELLED, "over"))
    assert told == ["before", "after"]
    assert (inbox.nbytes, inbox._feeds, inbox._failed) == (0, {}, {})


def test_too_much_for_one_session_does_not_end_the_connection_that_all_sessions_share(port, monkeypatch):
    monkeypatch.setattr("atoll.transfers.data_port.MAX_INBOX_BYTES", 100)
    data_port, arrived, changed = port
    data_port.set_peers(((0, str(data_port.address)),), "between hosts")
    peer = data_port.to_host(0)
    for feed in (OWN_NUMBERS, OWN_NUMBERS + 1):
        peer.send(9, feed, [content(1000)])
    peer.send(8, 4, [b"another session's"])
    with changed:
        assert changed.wait_for(lambda: arrived, SECONDS)
    assert arrived == [(8, 4)]
    assert len(data_port.inbox.take(9, OWN_NUMBERS)[0]) == 1000
    with pytest.raises(StatusError) as raised:
        data_port.inbox.take(9, OWN_NUMBERS + 1)
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
    assert gone(channel._socket)
    data_port.inbox.drop_session(5)  # with its store, in the session's own order
    assert data_port.inbox.nbytes == 0
    channel.close()
