"""Memory of this process that large pieces land in. What becomes free is kept for the next, since fresh pages cost more
than the copy into them.

Bounded: `KEPT_BYTES` of free memory in a process, for `KEPT_SECONDS` after its last use, and not longer than there are
channels that could use it.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from atoll.transfers.host_memory import Bytes, aligned, lent

KEPT_BYTES = 1 << 30
KEPT_SECONDS = 60.0
# Smaller pieces get memory from the allocator, which keeps it itself.
LEAST_BLOCK_BYTES = 4 << 20
# The same of what is to be zeros: there is none from the allocator that costs nothing.
LEAST_ZEROS_BYTES = 512 << 10
_MOST_RANGES = 64  # beyond, a block is cleared where it was written, whatever is written now
_LOOKED_AT = 8  # of the blocks that fit, those that were used last
_HUGE_PAGE = 2 << 20
_MADVISE = getattr(mmap, "MADV_HUGEPAGE", None)


# From the first byte to that behind the last.
Range = tuple[int, int]
_ALL = [(0, sys.maxsize)]


@dataclass(frozen=True, eq=False)
class _Block:
    """`written` are the ranges in which it may not be zeros."""

    memory: mmap.mmap
    written: list[Range]

    def __len__(self) -> int:
        return len(self.memory)


@dataclass(frozen=True)
class ReceiveBufferStatistics:
    """What is kept free, and how often memory was used again."""

    free_blocks: int
    free_bytes: int
    reused: int


class ReceiveBufferPool:
    """For any thread. A block comes back by itself once nothing refers to its array any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[float, _Block]] = []  # the longest unused first
        # Arrays end on any thread, also inside of `take`: they only append here.
        self._returned: deque[tuple[float, _Block]] = deque()
        self._reused = 0
        self._users = 0
        self._unused = threading.Event()  # set where no channel is open: nothing is kept then
        self._unused.set()
        self._trims = False

    def open(self) -> None:
        """A channel is opened: until `close`, what becomes free is kept."""
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
        """Uninitialised bytes at a multiple of 64. Raises MemoryError."""
        if nbytes < LEAST_BLOCK_BYTES:
            return aligned(nbytes)
        memory = self._memory(nbytes, _ALL)
        return self._lent(memory, nbytes, [(0, len(memory))])

    def take_zeros(self, nbytes: int, written: Iterable[Range]) -> Bytes:
        """Bytes as of `take`, zeros outside of the ranges `written`. These the caller writes, all of them and nothing
        else. Raises MemoryError.

        Memory that is used again is cleared where it was written last, and that only where it is not written now.
        """
        if nbytes < LEAST_ZEROS_BYTES:
            return aligned(nbytes, np.zeros)
        ranges = merged(written)
        if len(ranges) > _MOST_RANGES:
            return self._lent(self._memory(nbytes, []), nbytes, [(ranges[0][0], ranges[-1][1])])
        return self._lent(self._memory(nbytes, ranges), nbytes, ranges)

    def _lent(self, memory: mmap.mmap, nbytes: int, written: list[Range]) -> Bytes:
        return lent(memory, nbytes, partial(self._give_back, _Block(memory, written)))

    def _memory(self, nbytes: int, written: list[Range]) -> mmap.mmap:
        """Zeros outside of these ranges."""
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
        """On any thread, whatever locks that holds: it takes none, and starts nothing."""
        # Of blocks of a size these are what is kept at most: nobody may come soon who drops the others.
        if not self._unused.is_set() and (len(self._returned) + 1) * len(block) <= KEPT_BYTES:
            self._returned.append((time.monotonic(), block))

    def _collect(self) -> None:
        """Takes over what was returned, within the bound. The caller has the lock."""
        while self._returned:
            self._free.append(self._returned.popleft())
        if self._unused.is_set():
            self._free.clear()
        held = sum(len(block) for _, block in self._free)
        while self._free and held > KEPT_BYTES:
            held -= len(self._free.pop(0)[1])

    def _trim(self) -> None:
        """Frees what has not been used for long, until no channel is open."""
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
    """Of a block: bytes to clear, then how much larger it is, then what would be zeros for somebody else."""
    return _length(without(block.written, written)), len(block), -_length(block.written)


def _length(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in order, none twice."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif start < stop:
            found.append((start, stop))
    return found


def without(ranges: list[Range], others: list[Range]) -> Iterator[Range]:
    """What of the one is not in the other; both are in order."""
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


# The process's own.
RECEIVE_BUFFERS = ReceiveBufferPool()
