"""Memory of this process that large pieces land in. What becomes free is kept for the next, since fresh pages cost more
than the copy into them.

Bounded: `KEPT_BYTES` of free memory in a process, for `KEPT_SECONDS` after its last use, and not longer than there are
channels that could use it.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

from atoll.transfers.host_memory import Bytes, aligned, lent

KEPT_BYTES = 1 << 30
KEPT_SECONDS = 60.0
# Smaller pieces get memory from the allocator, which keeps it itself.
LEAST_BLOCK_BYTES = 4 << 20
_HUGE_PAGE = 2 << 20
_MADVISE = getattr(mmap, "MADV_HUGEPAGE", None)


@dataclass(frozen=True)
class LandingStatistics:
    """What is kept free, and how often memory was used again."""

    free_blocks: int
    free_bytes: int
    reused: int


class LandingMemory:
    """For any thread. A block comes back by itself once nothing refers to its array any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[float, mmap.mmap]] = []  # the longest unused first
        # Arrays end on any thread, also inside of `take`: they only append here.
        self._returned: deque[tuple[float, mmap.mmap]] = deque()
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
        size = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        with self._lock:
            self._collect()
            fitting = [entry for entry in self._free if size <= len(entry[1]) <= size + size // 4]
            block = min(fitting, key=lambda entry: len(entry[1])) if fitting else None
            if block is not None:
                self._free.remove(block)
                self._reused += 1
            starts = not self._trims and not self._unused.is_set()
            self._trims = self._trims or starts
        if starts:
            threading.Thread(target=self._trim, name="atoll-landing-memory", daemon=True).start()
        memory = block[1] if block is not None else _map(size)
        return lent(memory, nbytes, partial(self._give_back, memory))

    def _give_back(self, memory: mmap.mmap) -> None:
        """On any thread, whatever locks that holds: it takes none, and starts nothing."""
        # Of blocks of a size these are what is kept at most: nobody may come soon who drops the others.
        if not self._unused.is_set() and (len(self._returned) + 1) * len(memory) <= KEPT_BYTES:
            self._returned.append((time.monotonic(), memory))

    def _collect(self) -> None:
        """Takes over what was returned, within the bound. The caller has the lock."""
        while self._returned:
            self._free.append(self._returned.popleft())
        if self._unused.is_set():
            self._free.clear()
        held = sum(len(memory) for _, memory in self._free)
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

    def statistics(self) -> LandingStatistics:
        with self._lock:
            self._collect()
            return LandingStatistics(len(self._free), sum(len(memory) for _, memory in self._free), self._reused)


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
LANDING = LandingMemory()
