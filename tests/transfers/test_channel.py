"""Data channels over socket pairs: pieces both ways, and one end in hand where a peer misbehaves."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import ConnectError, FrameError, StatusError
from atoll.protocol.number_ranges import CALL_FEEDS
from atoll.transfers import channel as data
from atoll.transfers import streams
from atoll.transfers.channel import DataChannel, Open, Passed
from atoll.transfers.file_engine import FilePiece
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.host_memory import aligned
from atoll.transfers.piece_contents import Filled
from atoll.transfers.shared_memory_engine import SHARED_THRESHOLD, BlockReturned, SharedMemoryPiece
from atoll.transfers.socket_engine import SocketEngine, SocketPiece
from atoll.wire.address import Address
from atoll.wire.byte_stream import SocketStream
from tests.file_limits import no_more_files
from tests.transfers.ends import SECONDS, Receiver, content, descriptors, frame, received, sealed


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 70_000, SHARED_THRESHOLD - 1, SHARED_THRESHOLD, 3_000_000])
def test_a_piece_arrives_with_its_bytes_whatever_way_it_takes(ends, nbytes):
    sender, receiver = ends[0], Receiver(ends[1])
    Receiver(sender)
    sent = content(nbytes)
    sender.send(3, 17, [sent])
    assert receiver.wait(1) == [(3, 17, sent.tobytes())]
    sender.close()
    assert receiver.join() is None


def test_parts_are_joined_in_order(ends):
    sender, receiver = ends[0], Receiver(ends[1])
    Receiver(sender)
    parts = [b"ab", np.arange(3, dtype=np.int16), bytearray(), memoryview(b"z")]
    sender.send(1, 2, parts)
    big = [content(200_000, 1), content(200_000, 2)]
    sender.send(1, 3, big)
    expected = [b"ab\x00\x00\x01\x00\x02\x00z", big[0].tobytes() + big[1].tobytes()]
    assert [piece[2] for piece in receiver.wait(2)] == expected


@pytest.mark.parametrize("nbytes", [10, 2_000_000])
def test_bytes_are_written_straight_into_what_they_travel_in(ends, nbytes):
    sender, receiver = ends[0], Receiver(ends[1])
    Receiver(sender)
    sent = content(nbytes)

    def fill(target: memoryview) -> None:
        target[:] = sent

    sender.send_contents(1, 2, Filled(nbytes, fill))
    assert receiver.wait(1)[0][2] == sent.tobytes()


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1001, 900_000])
def test_a_large_buffer_travels_in_parts_of_which_the_last_says_so(ends, monkeypatch, nbytes):
    monkeypatch.setattr(data, "PART_BYTES", 1000 if nbytes < 10_000 else 300_000)
    monkeypatch.setattr(streams, "STREAM_THRESHOLD", 10_000_000)  # chunks have tests of their own
    sender, receiver = ends[0], Receiver(ends[1])
    Receiver(sender)
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
    Receiver(ends[0])
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


def test_a_piece_that_its_receiver_would_refuse_is_not_sent():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = DataChannel(ours, (SocketEngine,))
        with pytest.raises(StatusError, match="cannot be sent at once: the limit is 1048576 bytes"):
            channel.send(1, 2, [bytes((1 << 20) + 1)])
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        channel.close()


# ---- peers that misbehave


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack("<I", 1 << 21), "over the limit"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "not a data frame"),
        (frame(["p", 1]), "not a data frame"),
        (frame(Open(1, "x")), "opened once"),
        (frame(SocketPiece(1, 2, -1)), "a piece of -1 bytes"),
        (frame(SocketPiece(1, 2, 1 << 50)), "a piece of"),
        (frame(SocketPiece(1, 2, (1 << 20) + 1)), "was sent at once"),
        (frame(SocketPiece(1, CALL_FEEDS.start, (8 << 30) + 1)), "was sent at once"),
        (frame(SocketPiece(1, 2, 10), b"short"), "inside a piece"),
        (frame(FilePiece(1, 2, 10)), "without its descriptor"),
        (frame(SharedMemoryPiece(1, 2, 10, block=0, block_bytes=100)), "not known"),
        (frame(SharedMemoryPiece(1, 2, 10, block=-7)), "not known"),
    ],
)
def test_a_peer_that_sends_what_is_no_frame_ends_the_channel_with_a_named_error(raw, sent, reason):
    error = received(raw, frame(SocketPiece(1, 1, 2), b"ok"), sent).error
    assert isinstance(error, FrameError)
    assert reason in str(error)


@pytest.mark.parametrize("cut", range(1, 11))
def test_a_peer_that_closes_between_pieces_or_inside_a_header_is_no_error(raw, cut):
    whole = frame(SocketPiece(1, 1, 2), b"ok")
    receiver = received(raw, whole, frame(SocketPiece(1, 2, 5))[:cut])
    assert receiver.error is None
    assert receiver.pieces == [(1, 1, b"ok")]


@pytest.mark.parametrize(
    ("piece", "size"),
    [
        (SocketPiece(1, 2, 4), 10),  # a descriptor that was not requested
        (FilePiece(1, 2, 10), 5),  # a file that is too short
        (SharedMemoryPiece(1, 2, 10, block=0, block_bytes=100), 50),
        (SharedMemoryPiece(1, 2, 10, block=0, block_bytes=0), 50),
        (SharedMemoryPiece(1, 2, 10, block=0, block_bytes=-5), 50),
        (SharedMemoryPiece(1, 2, 60, block=0, block_bytes=50), 50),
        (BlockReturned(4), 10),
        (Open(1, "x"), 10),
    ],
)
def test_descriptors_of_a_peer_that_misbehaves_are_closed(raw, piece, size):
    mine, channel = raw
    descriptor = sealed(size)
    sent = frame(piece)
    before = descriptors()
    socket.send_fds(mine, [sent[:1]], [descriptor])
    receiver = received(raw, sent[1:])
    assert receiver.error is None or isinstance(receiver.error, (ConnectError, StatusError))
    channel.close()
    assert descriptors() == before - 1
    os.close(descriptor)


@pytest.mark.parametrize("piece", [FilePiece(1, 2, 10), Passed(3)])
def test_a_descriptor_that_this_process_cannot_take_is_named_as_the_reason(raw, piece):
    mine, _ = raw
    descriptor, sent = sealed(10), frame(piece)
    socket.send_fds(mine, [sent[:1]], [descriptor])
    mine.sendall(sent[1:])
    os.close(descriptor)
    with no_more_files():
        error = received(raw).error
    assert isinstance(error, FrameError)
    assert "the descriptor of a data frame was lost, because this process has too many open files" in str(error)


def test_a_frame_with_several_descriptors_is_invalid_and_they_are_closed(raw):
    mine, channel = raw
    descriptor, sent = sealed(10), frame(FilePiece(1, 2, 10))
    before = descriptors()
    socket.send_fds(mine, [sent[:1]], [descriptor] * 3)
    error = received(raw, sent[1:]).error
    channel.close()
    assert isinstance(error, FrameError)
    assert "it has several descriptors" in str(error)
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
    mine.sendall(frame(BlockReturned(1)))
    with pytest.raises(ConnectError, match="first frame"):
        channel.receive_open()


def test_closing_ends_the_thread_that_reads(unix_ends):
    receiver = Receiver(unix_ends[0])
    unix_ends[0].close()
    assert receiver.join() is None
    assert unix_ends[0].is_closed


def test_dialing_where_no_data_port_listens_names_the_address(short_directory: Path):
    with pytest.raises(ConnectError, match=f"unix:{short_directory}/none"):
        DataChannel.dial(Address(path=f"{short_directory}/none"))


def test_memory_for_pieces_is_aligned_for_a_cpu_device():
    for nbytes in (1, 63, 64, 100_000):
        memory = aligned(nbytes)
        assert memory.nbytes == nbytes
        assert memory.ctypes.data % 64 == 0


def test_a_channel_that_is_closed_or_sends_takes_nothing_at_once(unix_ends):
    channel = unix_ends[0]
    assert channel.can_send_nowait(100)
    with ThreadPoolExecutor(1) as elsewhere, channel._socket._send_lock:
        assert not elsewhere.submit(channel.can_send_nowait, 100).result()
    channel.close()
    assert not channel.can_send_nowait(100)


def test_the_thread_that_reserves_a_channel_sends_while_others_cannot_reserve_it(unix_ends):
    channel, receiver = unix_ends[0], Receiver(unix_ends[1])

    with ThreadPoolExecutor(1) as elsewhere:
        assert channel.try_reserve(100)
        assert not elsewhere.submit(channel.try_reserve, 100).result()
        channel.send(1, 2, [b"abc"])
        channel.release()
        assert elsewhere.submit(channel.try_reserve, 100).result()
        elsewhere.submit(channel.release).result()
    receiver.wait(1)
    assert receiver.pieces == [(1, 2, b"abc")]


def test_a_thread_that_is_writing_a_frame_cannot_write_another_one_into_it():
    """A garbage collection on that thread can return a block of shared memory to the peer at any time."""

    class Collecting(SocketStream):
        def send(self, parts: Sequence[bytes | memoryview]) -> None:
            if not returned:
                returned.append(False)
                returned[0] = sender.send_nowait(BlockReturned(2))
            super().send(parts)

    returned = list[bool]()
    ours, theirs = socket.socketpair()
    sender = FrameSocket(Collecting(ours))
    descriptor = sealed(4096)
    sender.send(BlockReturned(1), descriptor=descriptor)
    assert returned == [False]
    assert sender.send_nowait(BlockReturned(3))
    expected = frame(BlockReturned(1)) + frame(BlockReturned(3))
    first, (passed,), _, _ = socket.recv_fds(theirs, len(expected), 1)
    assert first + theirs.recv(len(expected) - len(first), socket.MSG_WAITALL) == expected
    for each in (descriptor, passed):
        os.close(each)
    sender.close()
    theirs.close()


def test_a_channel_whose_peer_does_not_read_cannot_be_reserved(unix_ends):
    channel, sent = unix_ends[0], 0
    while channel.can_send_nowait(10_000):
        channel.send(1, 2, [b"a" * 10_000])
        sent += 1
    assert not channel.try_reserve(10_000)
    Receiver(unix_ends[1]).wait(sent)
    with ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(channel.try_reserve, 10_000).result(), "the failed attempt holds nothing"
        elsewhere.submit(channel.release).result()


def test_a_socket_that_nobody_takes_is_closed(unix_ends):
    receiver = Receiver(unix_ends[1])
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            unix_ends[0].pass_socket(theirs)
        ours.settimeout(SECONDS)
        assert ours.recv(1) == b""
    unix_ends[0].send(1, 2, [b"and the channel goes on"])
    assert receiver.wait(1)[0][2] == b"and the channel goes on"


def test_what_is_passed_and_is_no_socket_ends_the_channel(unix_ends):
    outcome: list[BaseException] = []

    def receive() -> None:
        try:
            unix_ends[1].receive(lambda *_: None, on_socket=lambda sock: sock.close())
        except OSError as error:
            outcome.append(error)

    receiving = threading.Thread(target=receive)
    receiving.start()
    with open("/dev/null") as file:
        unix_ends[0].pass_socket(file)  # type: ignore[arg-type]
    receiving.join(SECONDS)
    assert len(outcome) == 1
