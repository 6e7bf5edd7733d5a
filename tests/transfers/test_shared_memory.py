"""Transfers through shared memory: blocks that are used again, waited for, sealed, and freed."""

from __future__ import annotations

import pytest

from atoll.transfers import shared_memory_pool
from atoll.transfers.channel import DataChannel
from atoll.transfers.shared_memory import SHARED_THRESHOLD
from atoll.transfers.shared_memory_pool import PoolStatistics
from tests.transfers.ends import SECONDS, Receiver, content, descriptors


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
    # Whether a block is back in time for the next piece is a race; that all of them are kept is not.
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
    assert pool_of(sender).used_blocks == 3, "three blocks for three pieces that nobody has given back"
    assert [piece[2] for piece in receiver.pieces] == [each.tobytes() for each in sent]


def test_a_sender_waits_for_a_block_and_then_gives_up(unix_ends, monkeypatch):
    monkeypatch.setattr(shared_memory_pool, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(shared_memory_pool, "_WAIT_SECONDS", 0.01)
    sender = unix_ends[0]
    receiver = Receiver(unix_ends[1], recycle=False)
    sender.send(1, 0, [content(500_000)])
    receiver.wait(1)
    with pytest.raises(TimeoutError, match="does not read"):
        sender.send(1, 1, [content(500_000)])
    returns = Receiver(sender)
    monkeypatch.setattr(shared_memory_pool, "_WAIT_SECONDS", SECONDS)
    receiver.held.pop()()
    sender.send(1, 1, [content(500_000, 1)])
    assert receiver.wait(2)[1][2] == content(500_000, 1).tobytes()
    unix_ends[1].close()
    returns.join()


def test_a_piece_larger_than_the_pool_still_gets_through(unix_ends, monkeypatch):
    monkeypatch.setattr(shared_memory_pool, "POOL_BYTES", 1 << 20)
    receiver = Receiver(unix_ends[1])
    unix_ends[0].send(1, 0, [content(3_000_000)])
    assert receiver.wait(1)[0][2] == content(3_000_000).tobytes()


def test_contents_that_cannot_be_written_give_their_block_back(unix_ends):
    def fill(target: memoryview) -> None:
        raise ValueError("no such shard")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such shard"):
            unix_ends[0].send_filled(1, 2, SHARED_THRESHOLD, fill)
    pool = pool_of(unix_ends[0])
    assert (pool.used_blocks, pool.free_blocks) == (0, 1)
