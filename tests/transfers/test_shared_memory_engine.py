"""Transfers through shared memory: blocks that are used again, waited for, sealed, and freed."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from atoll.errors import FrameError
from atoll.transfers.channel import DataChannel
from atoll.transfers.piece_contents import Filled
from atoll.transfers.shared_memory_engine import SHARED_THRESHOLD, BlockDropped, BlockReturned, SharedMemoryPiece
from atoll.transfers.shared_memory_pool import PoolLimits, PoolStatistics, SharedMemoryPool
from atoll.transfers.socket_engine import SocketPiece
from tests.conftest import gone
from tests.transfers.ends import SECONDS, Ends, Receiver, content, descriptors, frame, kinds_with, received, sealed
from tests.waiting import until

Raw = tuple[socket.socket, DataChannel]


def pool_of(channel: DataChannel) -> PoolStatistics:
    statistics: PoolStatistics = channel.statistics().engines["SharedMemoryEngine"]
    return statistics


def test_blocks_are_used_again_once_they_have_been_read(unix_ends):
    sender, receiver = unix_ends[0], Receiver(unix_ends[1])
    back = Receiver(sender)  # reads what the receiver sends back
    before = descriptors()
    for feed in range(10):
        sender.send(1, feed, [content(1_000_000, feed)])
        receiver.wait(feed + 1)
    assert [piece[2] for piece in receiver.pieces] == [content(1_000_000, i).tobytes() for i in range(10)]
    # A block may or may not return in time for the next piece, but all blocks must be kept.
    assert descriptors() - before <= 10
    unix_ends[1].close()
    assert back.join() is None


def test_a_block_is_not_written_over_while_it_is_read(unix_ends):
    sender = unix_ends[0]
    receiver = Receiver(unix_ends[1], recycle=False)
    sent = [content(500_000, i) for i in range(3)]
    for feed, each in enumerate(sent):
        sender.send(1, feed, [each])
    receiver.wait(3)
    assert pool_of(sender).used_blocks == 3, "three blocks for three pieces that are not released"
    assert [piece[2] for piece in receiver.pieces] == [each.tobytes() for each in sent]


@pytest.mark.parametrize("unix_ends", [kinds_with(limits=PoolLimits(1 << 20, wait_seconds=0.01))], indirect=True)
def test_a_sender_waits_for_a_block_and_then_gives_up(unix_ends):
    sender = unix_ends[0]
    receiver = Receiver(unix_ends[1], recycle=False)
    sender.send(1, 0, [content(500_000)])
    receiver.wait(1)
    with pytest.raises(TimeoutError, match="does not read"):
        sender.send(1, 1, [content(500_000)])
    returns = Receiver(sender)
    receiver.held.pop()()
    until(lambda: pool_of(sender).free_blocks == 1)
    sender.send(1, 1, [content(500_000, 1)])
    assert receiver.wait(2)[1][2] == content(500_000, 1).tobytes()
    unix_ends[1].close()
    returns.join()


@pytest.mark.parametrize("unix_ends", [kinds_with(limits=PoolLimits(1 << 20))], indirect=True)
def test_a_piece_larger_than_the_pool_still_gets_through(unix_ends):
    receiver = Receiver(unix_ends[1])
    unix_ends[0].send(1, 0, [content(3_000_000)])
    assert receiver.wait(1)[0][2] == content(3_000_000).tobytes()


def test_contents_that_cannot_be_written_give_their_block_back(unix_ends):
    def fill(target: memoryview) -> None:
        raise ValueError("no such shard")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such shard"):
            unix_ends[0].send_contents(1, 2, Filled(SHARED_THRESHOLD, fill))
    pool = pool_of(unix_ends[0])
    assert (pool.used_blocks, pool.free_blocks) == (0, 1)


def test_a_block_that_could_not_be_sent_is_announced_by_the_next_piece(unix_ends, monkeypatch):
    sender, receiver = unix_ends[0], Receiver(unix_ends[1])

    def refuse(*_: object) -> None:
        raise OSError("too many descriptors are on their way")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", refuse)
        with pytest.raises(OSError, match="on their way"):
            sender.send(1, 1, [content(500_000)])
    assert (pool_of(sender).used_blocks, pool_of(sender).free_blocks) == (0, 1)
    sender.send(1, 2, [content(500_000, 2)])
    assert receiver.wait(1) == [(1, 2, content(500_000, 2).tobytes())]
    unix_ends[1].close()
    assert receiver.join() is None


def test_a_block_that_the_peer_returns_before_it_was_sent_stays_in_use(raw: Raw) -> None:
    """Otherwise, the pool closes its descriptor, and the sender passes whatever has the same number then."""
    mine, channel = raw
    receiver = Receiver(channel)

    def fill(target: memoryview) -> None:
        mine.sendall(frame(BlockReturned(0)) + frame(SocketPiece(1, 7, 2), b"ok"))
        receiver.wait(1)
        assert pool_of(channel).used_blocks == 1

    channel.send_contents(1, 2, Filled(SHARED_THRESHOLD, fill))
    _, (descriptor,), _, _ = socket.recv_fds(mine, 1, 1)
    assert os.fstat(descriptor).st_size == 1 << 20
    os.close(descriptor)
    mine.sendall(frame(BlockReturned(0)))
    until(lambda: pool_of(channel).free_blocks == 1)
    mine.close()
    assert receiver.join() is None


# ---- memory that a peer could shorten


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_a_block_that_its_sender_could_shorten_is_not_mapped(raw: Raw, seals: int) -> None:
    mine, _ = raw
    descriptor = sealed(100, seals)
    sent = frame(SharedMemoryPiece(1, 2, 10, block=0, block_bytes=100))
    socket.send_fds(mine, [sent[:1]], [descriptor])
    error = received(raw, sent[1:]).error
    assert isinstance(error, FrameError)
    assert "sealed against shrinking" in str(error)
    os.close(descriptor)


def test_a_file_is_no_block(raw: Raw, short_directory: Path) -> None:
    mine, _ = raw
    (short_directory / "file").write_bytes(bytes(100))
    with open(short_directory / "file", "rb") as file:
        sent = frame(SharedMemoryPiece(1, 2, 10, block=0, block_bytes=100))
        socket.send_fds(mine, [sent[:1]], [file.fileno()])
        assert "sealed against shrinking" in str(received(raw, sent[1:]).error)


@pytest.mark.parametrize("raw", [kinds_with(max_peer_blocks=3)], indirect=True)
def test_no_more_blocks_are_mapped_than_a_pool_has(raw: Raw) -> None:
    mine, channel = raw
    descriptor = sealed(4096)
    receiver = Receiver(channel)
    for block in range(4):
        sent = frame(SharedMemoryPiece(1, block, 10, block=block, block_bytes=4096))
        socket.send_fds(mine, [sent[:1]], [descriptor])
        mine.sendall(sent[1:])
    assert "more than 3 blocks" in str(receiver.join())
    os.close(descriptor)


@pytest.mark.parametrize("raw", [kinds_with(max_peer_bytes=3 * 4096)], indirect=True)
def test_no_more_bytes_are_mapped_than_a_peer_can_have(raw: Raw) -> None:
    """Otherwise, a peer with sparse memory could use all addresses of this process."""
    mine, channel = raw
    descriptor = sealed(4 * 4096)
    receiver = Receiver(channel)
    for block, pages in enumerate((1, 2, 4)):
        sent = frame(SharedMemoryPiece(1, block, 10, block=block, block_bytes=pages * 4096))
        socket.send_fds(mine, [sent[:1]], [descriptor])
        mine.sendall(sent[1:])
    assert f"more than {3 * 4096} bytes" in str(receiver.join())
    assert len(receiver.pieces) == 2
    os.close(descriptor)


@pytest.mark.parametrize("again", ["another piece", "the descriptor again", "a drop"])
def test_a_block_that_is_being_read_cannot_be_used_again(raw: Raw, again: str) -> None:
    """Otherwise, each such use could start a thread that returns the block, or keep another mapping."""
    mine, channel = raw
    descriptor = sealed(4096)
    receiver = Receiver(channel, recycle=False)
    sent = frame(SharedMemoryPiece(1, 1, 10, block=3, block_bytes=4096))
    socket.send_fds(mine, [sent[:1]], [descriptor])
    mine.sendall(sent[1:])
    receiver.wait(1)
    if again == "the descriptor again":
        socket.send_fds(mine, [sent[:1]], [descriptor])
        mine.sendall(sent[1:])
    else:
        mine.sendall(sent if again == "another piece" else frame(BlockDropped(3)))
    assert "block 3 of shared memory is used again before it was returned" in str(receiver.join())
    os.close(descriptor)


def test_a_block_can_be_used_again_as_soon_as_the_peer_receives_it(raw: Raw) -> None:
    mine, channel = raw
    descriptor = sealed(4096)
    receiver = Receiver(channel)
    sent = frame(SharedMemoryPiece(1, 1, 10, block=3, block_bytes=4096))
    socket.send_fds(mine, [sent[:1]], [descriptor])
    mine.sendall(sent[1:])
    for count in range(2, 50):
        returned = frame(BlockReturned(3))
        assert mine.recv(len(returned), socket.MSG_WAITALL) == returned
        mine.sendall(sent)
        receiver.wait(count)
    mine.close()
    assert receiver.join() is None
    os.close(descriptor)


def test_blocks_cannot_be_shortened_by_who_has_their_descriptor() -> None:
    pool = SharedMemoryPool(lambda block: None)
    block = pool.take(1000)
    with pytest.raises(PermissionError):
        os.ftruncate(block.descriptor, 0)
    pool.close()


# ---- unused memory


@pytest.mark.parametrize("unix_ends", [kinds_with(idle_seconds=1)], indirect=True)
def test_an_idle_pool_is_freed_at_both_ends_and_grows_again(unix_ends: Ends) -> None:
    before = descriptors()
    sender, receiver = unix_ends[0], Receiver(unix_ends[1])
    back = Receiver(sender)
    for feed in range(3):
        sender.send(1, feed, [content(1_000_000, feed)])
    receiver.wait(3)
    assert pool_of(sender).nbytes > 0
    mapped = unix_ends[1]._engines[1]._peer_blocks  # type: ignore[attr-defined]
    assert not gone(lambda: [*mapped, *range(pool_of(sender).nbytes > 0), *range(descriptors() > before)])
    sender.send(1, 3, [content(1_000_000, 3)])
    assert receiver.wait(4)[3][2] == content(1_000_000, 3).tobytes()
    unix_ends[1].close()
    assert back.join() is None


@pytest.mark.parametrize("unix_ends", [kinds_with(limits=PoolLimits(4 << 20))], indirect=True)
def test_blocks_that_make_room_for_larger_ones_do_not_end_the_channel(unix_ends: Ends) -> None:
    sender, receiver = unix_ends[0], Receiver(unix_ends[1])
    back = Receiver(sender)
    for feed, nbytes in enumerate((1_000_000, 4_000_000, 1_000_000, 4_000_000)):
        sender.send(1, feed, [content(nbytes, feed)])
        assert receiver.wait(feed + 1)[feed][2] == content(nbytes, feed).tobytes()
        assert not gone(lambda: [*range(pool_of(sender).used_blocks)])
    assert pool_of(sender).nbytes <= 4 << 20
    unix_ends[1].close()
    assert back.join() is None


def test_a_channel_that_is_closed_frees_its_blocks_and_refuses_more(unix_ends: Ends) -> None:
    before = descriptors()
    sender, receiver = unix_ends[0], Receiver(unix_ends[1], recycle=False)
    sender.send(1, 1, [content(1_000_000)])
    receiver.wait(1)
    sender.close()
    with pytest.raises(OSError, match="closed"):
        sender.send(1, 2, [content(1_000_000)])
    unix_ends[1].close()
    receiver.join()
    assert descriptors() == before - 2, "both sockets, and no memory"


def test_who_waits_for_a_block_is_refused_when_the_pool_is_closed() -> None:
    pool = SharedMemoryPool(lambda block: None, PoolLimits(1 << 20))
    pool.take(1000)
    refused = threading.Event()

    def wait() -> None:
        with pytest.raises(BrokenPipeError):
            pool.take(1000)
        refused.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not gone(lambda: [*range(pool.statistics().waits == 0)])
    pool.close()
    assert refused.wait(SECONDS)
    thread.join(SECONDS)


def test_a_block_is_given_back_without_waiting_for_a_peer_that_does_not_read(unix_ends):
    sender, receiver = unix_ends[0], Receiver(unix_ends[1])
    back = Receiver(sender)
    with unix_ends[1]._socket._send_lock:  # as while a large piece is sent to a peer that does not read
        for feed in range(2):
            sender.send(1, feed, [content(500_000)])
        receiver.wait(2)
        assert pool_of(sender).used_blocks == 2
    assert gone(lambda: ["blocks"] if pool_of(sender).used_blocks else []) == []
    unix_ends[1].close()
    assert back.join() is None


def test_blocks_that_the_receiver_holds_keep_no_sender_waiting() -> None:
    pool = SharedMemoryPool(lambda block: None, PoolLimits(1 << 20, wait_seconds=0.01))
    held = [pool.take(1 << 20, is_held=True) for _ in range(3)]
    passing = pool.take(1 << 20)
    with pytest.raises(TimeoutError):
        pool.take(1 << 20)
    pool.give_back(held[0].number)
    assert pool.take(1 << 20) is held[0]
    assert pool.statistics().nbytes == 4 << 20
    for block in (passing, *held):
        pool.give_back(block.number)
    assert pool.statistics() == PoolStatistics(free_blocks=4, used_blocks=0, nbytes=4 << 20, waits=1)
    pool.trim()
    assert pool.statistics().nbytes == 0
    pool.close()


def test_of_blocks_that_it_asks_for_a_receiver_gets_no_more_than_the_bound() -> None:
    pool = SharedMemoryPool(lambda block: None, PoolLimits(1 << 20, held_bytes=2 << 20, wait_seconds=0.01))
    large = pool.take(4 << 20, is_held=True)
    pool.give_back(large.number)
    small = pool.take(1 << 20, is_held=True)
    with pytest.raises(TimeoutError, match="does not read"):
        pool.take(4 << 20, is_held=True)
    pool.give_back(small.number)
    assert pool.take(4 << 20, is_held=True).size == 4 << 20
    pool.close()
