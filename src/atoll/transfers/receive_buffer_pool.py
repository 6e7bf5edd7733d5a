"""Host memory that receives large pieces. Free memory is kept for reuse, because fresh pages cost more than the copy.

Bounded: a process keeps `KEPT_BYTES` of free memory, for `KEPT_SECONDS` after its last use and only while channels are
open.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

import msgspec
import numpy as np

from atoll.cluster.processes.machine_memory import machine_memory
from atoll.transfers.host_memory import Bytes, aligned, lent

# With less, an array of 1 GiB and the next one, which may arrive before the first is freed, displace each other.
KEPT_BYTES = min(4 << 30, machine_memory() // 8)
KEPT_SECONDS = 60.0
# Smaller pieces use the allocator, which keeps free memory itself.
MIN_BLOCK_BYTES = 4 << 20
# Smaller arrays of zeros use the allocator. The limit is lower because the allocator has to clear memory.
MIN_ZEROS_BYTES = 512 << 10
_MAX_RANGES = 64  # if there are more, a block is cleared in all ranges that were written
_LOOKED_AT = 8  # fitting blocks that are compared, the last used
_HUGE_PAGE = 2 << 20
_MADVISE = getattr(mmap, "MADV_HUGEPAGE", None)


Range = tuple[int, int]  # start and stop, in bytes
_ALL = [(0, sys.maxsize)]


class _Block(msgspec.Struct, frozen=True, eq=False):
    memory: mmap.mmap
    written: list[Range]  # outside of these ranges the memory is zero

    def __len__(self) -> int:
        return len(self.memory)


class ReceiveBufferStatistics(msgspec.Struct, frozen=True):
    free_blocks: int
    free_bytes: int
    reused: int  # how often a block was used again


class ReceiveBufferPool:
    """Blocks of host memory, each of which returns once nothing refers to its array. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[float, _Block]] = []  # with the time of the last use, the oldest first
        # Arrays can end on any thread, even inside `take`, so `_give_back` only appends here.
        self._returned: deque[tuple[float, _Block]] = deque()
        self._reused = 0
        self._users = 0
        self._unused = threading.Event()  # set while no channel is open; then no memory is kept
        self._unused.set()
        self._trims = False

    def open(self) -> None:
        """Keep free memory until `close`, because a channel was opened."""
        with self._lock:
            self._users += 1
            self._unused.clear()

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._unused.set()
                self._collect()
                self._free.clear()

    def take(self, nbytes: int) -> Bytes:
        """Return uninitialized bytes at a multiple of 64. Raise MemoryError."""
        if nbytes < MIN_BLOCK_BYTES:
            return aligned(nbytes)
        memory = self._memory(nbytes, _ALL)
        return self._lent(memory, nbytes, [(0, len(memory))])

    def take_zeros(self, nbytes: int, written: Iterable[Range]) -> Bytes:
        """Return bytes at a multiple of 64 that are zero outside the ranges `written`. Raise MemoryError.

        The caller writes exactly these ranges. Reused memory is cleared only where it was written last and is not
        written now.
        """
        if nbytes < MIN_ZEROS_BYTES:
            return aligned(nbytes, np.zeros)
        ranges = merged(written)
        if len(ranges) > _MAX_RANGES:
            return self._lent(self._memory(nbytes, []), nbytes, [(ranges[0][0], ranges[-1][1])])
        return self._lent(self._memory(nbytes, ranges), nbytes, ranges)

    def _lent(self, memory: mmap.mmap, nbytes: int, written: list[Range]) -> Bytes:
        return lent(memory, nbytes, partial(self._give_back, _Block(memory, written)))

    def _memory(self, nbytes: int, written: list[Range]) -> mmap.mmap:
        """Return a block's memory that is zero outside the ranges `written`."""
        size = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        with self._lock:
            self._collect()
            fitting = [entry for entry in self._free if size <= len(entry[1]) <= size + size // 4]
            best = min(fitting[-_LOOKED_AT:], key=lambda entry: _cost(entry[1], written)) if fitting else None
            if best is not None:
                self._free.remove(best)
                self._reused += 1
            starts = not self._trims and not self._unused.is_set()
            self._trims = self._trims or starts
        if starts:
            threading.Thread(target=self._trim, name="atoll-receive-buffers", daemon=True).start()
        if best is None:
            return _map(size)
        _, block = best
        bytes_ = np.frombuffer(block.memory, np.uint8)
        for start, stop in without(block.written, written):
            bytes_[start:stop] = 0
        return block.memory

    def _give_back(self, block: _Block) -> None:
        """Return a block to the pool. Called on any thread that may hold any lock, so it takes none."""
        # `_collect`, which applies the bound, may not run soon, so bound the returned blocks here as well.
        if not self._unused.is_set() and (len(self._returned) + 1) * len(block) <= KEPT_BYTES:
            self._returned.append((time.monotonic(), block))

    def _collect(self) -> None:
        """Move returned blocks to the free ones, within the bound. The caller holds the lock."""
        while self._returned:
            self._free.append(self._returned.popleft())
        if self._unused.is_set():
            self._free.clear()
        held = sum(len(block) for _, block in self._free)
        while self._free and held > KEPT_BYTES:
            held -= len(self._free.pop(0)[1])

    def _trim(self) -> None:
        """Free blocks that have not been used for long, until no channel is open."""
        while True:
            is_unused = self._unused.wait(KEPT_SECONDS / 2)
            with self._lock:
                self._collect()
                oldest = time.monotonic() - KEPT_SECONDS
                self._free = [entry for entry in self._free if entry[0] > oldest]
                if is_unused:
                    self._free.clear()
                    self._trims = False
                    return

    def statistics(self) -> ReceiveBufferStatistics:
        with self._lock:
            self._collect()
            return ReceiveBufferStatistics(len(self._free), sum(len(block) for _, block in self._free), self._reused)


def _cost(block: _Block, written: list[Range]) -> tuple[int, int, int]:
    """Return the sort key of a fitting block: bytes to clear, then its size, then its written bytes, most first.

    Blocks with fewer written bytes remain for arrays that need more zeros.
    """
    return _length(without(block.written, written)), len(block), -_length(block.written)


def _length(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return sorted, disjoint ranges that cover the same bytes."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif start < stop:
            found.append((start, stop))
    return found


def without(ranges: list[Range], others: list[Range]) -> Iterator[Range]:
    """Yield the parts of `ranges` outside of `others`. Both are sorted."""
    at = 0
    for start, stop in ranges:
        while at < len(others) and others[at][1] <= start:
            at += 1
        number = at
        while number < len(others) and others[number][0] < stop:
            if start < others[number][0]:
                yield start, others[number][0]
            start = others[number][1]
            number += 1
        if start < stop:
            yield start, stop


def _map(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"no memory for a piece of {size} bytes: {error}") from None
    if _MADVISE is not None:
        with contextlib.suppress(OSError):
            memory.madvise(_MADVISE)
    return memory


RECEIVE_BUFFERS = ReceiveBufferPool()  # of this process
