"""A sender's shared memory: memfd blocks that are reused, because fresh memory costs more than the copy into it.

The blocks have no name in the file system, so nothing remains if a process is killed. They are sealed against
shrinking, and the receiver that maps them checks the seal.

Bounded: a pool has `PoolLimits.nbytes`, or one larger block. A sender waits for a block if that many bytes are in use.
Blocks that the receiver has requested in order to hold them have a separate bound, `PoolLimits.held_bytes`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable

import msgspec

from atoll.transfers.sealed_memory import sealed_memory

POOL_BYTES = 1 << 30
MIN_BLOCK_BYTES = 1 << 20
# A block in use is often about to be returned, and waiting for it is cheaper than using fresh memory.
_RETURN_SECONDS = 0.01


class PoolLimits(msgspec.Struct, frozen=True):
    nbytes: int = POOL_BYTES
    held_bytes: int = POOL_BYTES
    wait_seconds: float = 60.0  # for a block


USUAL_LIMITS = PoolLimits()


class SharedMemoryBlock(msgspec.Struct, eq=False):
    """A memfd that is mapped here, and in the receiver once that has received the descriptor."""

    number: int  # unique in the pool
    size: int  # bytes
    descriptor: int
    memory: mmap.mmap
    is_announced: bool = False  # whether the receiver has the descriptor, or is about to get it
    is_held: bool = False  # whether the receiver has requested the piece in order to hold the block

    def view(self) -> memoryview:
        """Return the memory, which stays valid while the view exists. Raise BrokenPipeError if the pool is closed."""
        try:
            return memoryview(self.memory)
        except ValueError:  # another thread has closed it
            raise BrokenPipeError("the channel is closed") from None

    def announce(self) -> int:
        """Return a duplicate of the descriptor, which the caller passes to the receiver and closes.

        From now on, the receiver may return the block, and the pool may free it. The number of the pool's descriptor
        may then belong to another file of this process before the caller passes it.
        """
        duplicate = os.dup(self.descriptor)
        self.is_announced = True
        return duplicate


class PoolStatistics(msgspec.Struct, frozen=True):
    free_blocks: int
    used_blocks: int
    nbytes: int
    waits: int  # how often a sender has waited for a block


class SharedMemoryPool:
    """The blocks of one channel's sender. Safe to use from any thread.

    `on_drop(block)` is called without the pool's lock for each block that is freed before the pool is closed.
    """

    def __init__(self, on_drop: Callable[[SharedMemoryBlock], None], limits: PoolLimits = USUAL_LIMITS) -> None:
        self._on_drop = on_drop
        self._limits = limits
        self._free: list[SharedMemoryBlock] = []
        self._used: dict[int, SharedMemoryBlock] = {}
        self._next = 0
        self._bytes = 0
        self._held_bytes = 0
        self._waits = 0
        self._is_closed = False
        self._available = threading.Condition()

    def take(self, nbytes: int, is_held: bool = False) -> SharedMemoryBlock:
        """Return a block of at least `nbytes`, which the caller owns until `give_back`.

        A block `is_held` if the receiver has requested its piece and will return the block late. Raise TimeoutError if
        the receiver returns no block, and BrokenPipeError if the pool is closed.
        """
        dropped: list[SharedMemoryBlock] = []
        try:
            with self._available:
                block = self._take(nbytes, is_held, dropped)
                self._used[block.number] = block
                if is_held:
                    block.is_held = True
                    self._held_bytes += block.size
                return block
        finally:
            for each in dropped:
                self._on_drop(each)

    def _take(self, nbytes: int, is_held: bool, dropped: list[SharedMemoryBlock]) -> SharedMemoryBlock:
        size = max(MIN_BLOCK_BYTES, 1 << (nbytes - 1).bit_length())
        if not is_held and any(block.size >= nbytes for block in self._used.values() if not block.is_held):
            self._available.wait_for(lambda: self._is_closed or self._fitting(nbytes), _RETURN_SECONDS)
        while not self._is_closed:
            must_wait = is_held and bool(self._held_bytes) and self._held_bytes + size > self._limits.held_bytes
            fitting = self._fitting(nbytes)
            if fitting and not must_wait:
                block = min(fitting, key=lambda block: block.size)
                self._free.remove(block)
                return block
            bound = self._limits.nbytes
            while self._free and self._bytes - self._held_bytes + size > bound:
                dropped.append(self._drop(self._free.pop(0)))
            is_room = self._bytes - self._held_bytes + size <= bound
            if not must_wait and (is_held or is_room or all(block.is_held for block in self._used.values())):
                return self._create(size)
            self._waits += 1
            if not self._available.wait(self._limits.wait_seconds):
                raise TimeoutError(
                    f"no shared memory became free within {self._limits.wait_seconds:.0f} s: the receiver does not read"
                )
        raise BrokenPipeError("the channel is closed")

    def _fitting(self, nbytes: int) -> list[SharedMemoryBlock]:
        return [block for block in self._free if block.size >= nbytes]

    def _create(self, size: int) -> SharedMemoryBlock:
        descriptor = sealed_memory("atoll", size)
        try:
            block = SharedMemoryBlock(self._next, size, descriptor, mmap.mmap(descriptor, size))
        except BaseException:
            os.close(descriptor)
            raise
        self._next += 1
        self._bytes += size
        return block

    def give_back(self, number: int) -> None:
        """Make a block available again."""
        with self._available:
            self._give_back(number)

    def returned(self, number: int) -> None:
        """Make a block available again that the peer returns.

        Ignore numbers of blocks that are not in use, or that the peer has not received, because peers are not trusted.
        """
        with self._available:
            block = self._used.get(number)
            if block is not None and block.is_announced:
                self._give_back(number)

    def _give_back(self, number: int) -> None:
        block = self._used.pop(number, None)
        if block is not None:
            if block.is_held:
                block.is_held = False
                self._held_bytes -= block.size
            self._free.append(block)
            self._available.notify_all()  # waiters need different sizes

    def trim(self) -> None:
        """Free all blocks that are not in use."""
        with self._available:
            blocks, self._free = self._free, []
            for block in blocks:
                self._drop(block)
        for block in blocks:
            self._on_drop(block)

    def _drop(self, block: SharedMemoryBlock) -> SharedMemoryBlock:
        self._bytes -= block.size
        with contextlib.suppress(BufferError):  # a sender is writing into it, and its last view will free it
            block.memory.close()
        os.close(block.descriptor)
        return block

    def close(self) -> None:
        """Free all blocks, and fail the senders that wait for one."""
        with self._available:
            self._is_closed = True
            for block in (*self._free, *self._used.values()):
                self._drop(block)
            self._free.clear()
            self._used.clear()
            self._available.notify_all()

    def statistics(self) -> PoolStatistics:
        with self._available:
            return PoolStatistics(len(self._free), len(self._used), self._bytes, self._waits)
