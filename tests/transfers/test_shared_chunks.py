"""Large transfers between hosts of one machine: in chunks through a few blocks, whatever the receiver keeps."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from atoll.errors import Code, FrameError, StatusError
from atoll.host_services.slabs import ArrayContents
from atoll.protocol.number_ranges import CALL_FEEDS, HOST_FEEDS
from atoll.transfers.channel import DataChannel
from atoll.transfers.piece_contents import BufferContents
from atoll.transfers.shared_chunks import (
    CHUNKED_THRESHOLD,
    CHUNKED_TOGETHER,
    CHUNKS_BYTES,
    SHARED_CHUNK_BYTES,
    SharedChunk,
)
from atoll.transfers.shared_memory_pool import PoolLimits, SharedMemoryBlock, SharedMemoryPool
from atoll.transfers.stream_transfers import StreamPiece
from atoll.transfers.streams import StreamStatistics
from tests.transfers.ends import Ends, Receiver, content, frame, kinds_with, sealed
from tests.waiting import until

HOSTS = HOST_FEEDS.start  # feeds between hosts are numbered from here on
LARGE = 10 * SHARED_CHUNK_BYTES + 123
Raw = tuple[socket.socket, DataChannel]


def statistics_of(channel: DataChannel) -> StreamStatistics:
    statistics: StreamStatistics = channel.statistics().engines["SharedChunksEngine"]
    return statistics


def test_a_large_piece_arrives_whole_through_a_few_blocks(unix_ends: Ends) -> None:
    sender, receiver = unix_ends[0], Receiver(unix_ends[1])
    Receiver(sender)
    sender.send(1, HOSTS, [content(LARGE)])
    assert receiver.wait(1) == [(1, HOSTS, content(LARGE).tobytes())]
    assert 0 < statistics_of(sender).pool_bytes <= CHUNKS_BYTES


@pytest.mark.parametrize("unix_ends", [kinds_with(limits=PoolLimits(2 * LARGE, wait_seconds=0.5))], indirect=True)
def test_pieces_that_the_receiver_keeps_do_not_hold_up_others(unix_ends: Ends) -> None:
    sender, receiver = unix_ends[0], Receiver(unix_ends[1], recycle=False)
    Receiver(sender)
    for number in range(5):  # as the shards of one array, which are read when all are there
        sender.send(1, HOSTS + number, [content(LARGE, number)])
    assert [each[1] for each in receiver.wait(5)] == [HOSTS + number for number in range(5)]
    assert receiver.pieces[4][2] == content(LARGE, 4).tobytes()


@pytest.mark.parametrize("together", [CHUNKED_TOGETHER, CHUNKED_TOGETHER - 1])
def test_many_pieces_that_are_read_together_go_through_a_few_blocks(unix_ends: Ends, together: int) -> None:
    sender, receiver = unix_ends[0], Receiver(unix_ends[1], recycle=False)
    Receiver(sender)
    for number in range(20):
        sender.send_contents(1, HOSTS + number, ArrayContents(content(SHARED_CHUNK_BYTES + 5, number), together))
    assert [each[2] for each in receiver.wait(20)] == [content(SHARED_CHUNK_BYTES + 5, n).tobytes() for n in range(20)]
    whole = sender.statistics().engines["SharedMemoryEngine"].nbytes
    is_bounded = statistics_of(sender).pool_bytes + whole <= CHUNKS_BYTES
    assert is_bounded == (together == CHUNKED_TOGETHER)


@pytest.mark.parametrize("feed", [1, CALL_FEEDS.start])
def test_what_clients_send_and_what_may_not_wait_goes_whole(unix_ends: Ends, feed: int) -> None:
    sender, receiver = unix_ends[0], Receiver(unix_ends[1])
    sender.send(1, feed, [content(CHUNKED_THRESHOLD)])
    assert receiver.wait(1)[0][2] == content(CHUNKED_THRESHOLD).tobytes()
    assert not statistics_of(sender).pool_bytes


def test_many_senders_share_the_blocks(unix_ends: Ends) -> None:
    sender, receiver = unix_ends[0], Receiver(unix_ends[1])
    Receiver(sender)
    threads = [
        threading.Thread(target=sender.send, args=(1, HOSTS + number, [content(CHUNKED_THRESHOLD, number)]))
        for number in range(6)
    ]
    for each in threads:
        each.start()
    arrived = {feed: contents for _, feed, contents in receiver.wait(6)}
    assert arrived == {HOSTS + number: content(CHUNKED_THRESHOLD, number).tobytes() for number in range(6)}
    for each in threads:
        each.join(5)
        assert not each.is_alive()


def test_contents_that_cannot_be_had_fail_their_feed_and_nothing_else(unix_ends: Ends) -> None:
    class Lost(BufferContents):
        def slice(self, start: int, stop: int) -> list[memoryview]:
            raise StatusError(Code.DATA_LOSS, "the array is gone")

    sender, failed = unix_ends[0], []
    thread = threading.Thread(
        target=unix_ends[1].receive, args=(lambda *_: None, lambda *each: failed.append(each)), daemon=True
    )
    thread.start()
    Receiver(sender)
    lost = Lost((memoryview(bytes(LARGE)),))
    with pytest.raises(StatusError, match="the array is gone"):
        sender.send_contents(1, HOSTS, lost)
    until(lambda: bool(failed))
    sender.send(1, HOSTS + 1, [content(LARGE)])


def test_a_channel_without_a_writing_thread_starts_one_for_the_next_piece(
    unix_ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = unix_ends[0], Receiver(unix_ends[1])
    Receiver(sender)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="shutdown"):
            sender.send(1, HOSTS, [content(LARGE)])
    sender.send(1, HOSTS + 1, [content(LARGE)])
    assert receiver.wait(1) == [(1, HOSTS + 1, content(LARGE).tobytes())]


def test_a_sender_learns_that_the_channel_has_ended(unix_ends: Ends) -> None:
    sender, errors = unix_ends[0], []

    def send() -> None:
        try:
            sender.send(1, HOSTS, [content(LARGE)])  # which nobody reads
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    until(lambda: statistics_of(sender).sending > 0)
    sender.close()
    thread.join(5)
    assert errors


# ---- peers that lie


def announced(raw: Raw) -> Receiver:
    mine, channel = raw
    mine.sendall(frame(StreamPiece(1, HOSTS, 2 * SHARED_CHUNK_BYTES, False, 1)))
    return Receiver(channel)


def send_block(mine: socket.socket, chunk: SharedChunk, descriptor: int) -> None:
    sent = frame(chunk)
    socket.send_fds(mine, [sent[:1]], [descriptor])
    mine.sendall(sent[1:])


def test_a_block_that_was_never_sent_ends_the_channel(raw: Raw) -> None:
    receiver = announced(raw)
    raw[0].sendall(frame(SharedChunk(1, 0, 7)))
    error = receiver.join()
    assert isinstance(error, FrameError)
    assert "block 7 is not known" in str(error)


@pytest.mark.parametrize(("size", "seals"), [(SHARED_CHUNK_BYTES, 0), (4096, None)], ids=["not sealed", "too short"])
def test_a_block_that_could_end_the_receiver_ends_the_channel(raw: Raw, size: int, seals: int | None) -> None:
    receiver = announced(raw)
    descriptor = sealed(size) if seals is None else sealed(size, seals)
    send_block(raw[0], SharedChunk(1, 0, 0), descriptor)
    os.close(descriptor)
    assert isinstance(receiver.join(), FrameError)


def test_more_blocks_than_a_sender_has_end_the_channel(raw: Raw) -> None:
    mine, channel = raw
    receiver = Receiver(channel)
    many = CHUNKS_BYTES // SHARED_CHUNK_BYTES + 1
    mine.sendall(frame(StreamPiece(1, HOSTS, many * SHARED_CHUNK_BYTES, False, 1)))
    descriptor = sealed(SHARED_CHUNK_BYTES)
    for number in range(many):
        send_block(mine, SharedChunk(1, number, number), descriptor)
    os.close(descriptor)
    error = receiver.join()
    assert isinstance(error, FrameError)
    assert "more blocks" in str(error)


@pytest.mark.parametrize("feed", [1, HOSTS], ids=["whole", "chunks"])
def test_a_piece_fails_as_others_do_if_its_channel_is_closed_before_its_memory_is_written(
    unix_ends: Ends, feed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other error would end the process of a host, because a thread that writes chunks would end with it."""
    sender = unix_ends[0]
    Receiver(unix_ends[1])
    Receiver(sender)
    take = SharedMemoryPool.take

    def take_and_close(pool: SharedMemoryPool, nbytes: int, is_held: bool = False) -> SharedMemoryBlock:
        block = take(pool, nbytes, is_held)
        sender.close()
        return block

    monkeypatch.setattr(SharedMemoryPool, "take", take_and_close)
    with pytest.raises(OSError, match="closed"):
        sender.send(1, feed, [content(LARGE)])
