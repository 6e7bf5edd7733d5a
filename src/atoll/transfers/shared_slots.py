"""Small contents that one process writes into memory that it shares with another one.

The writer puts contents with a number into a free slot. It then sends a message on some connection, which makes the
reader take the contents of that number. This frees the slot. So contents need no message, and no thread of the reader
wakes up for them.

The reader makes the memory: a memfd that is sealed against changes of its size. The writer can change contents at any
time, so the reader copies them before it uses them.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from atoll.errors import FrameError
from atoll.transfers.sealed_memory import sealed_memory

SLOTS = 128
SLOT_BYTES = 1 << 16
_TABLE_BYTES = 8 * SLOTS  # the number of the contents in each slot, before the slots; 0 if the slot is free
_NBYTES = _TABLE_BYTES + SLOTS * SLOT_BYTES


class SharedSlots:
    """The reader's end, which makes the memory. The writer maps `descriptor`. Use it on one thread."""

    def __init__(self) -> None:
        self.descriptor = sealed_memory("atoll-slots", _NBYTES)
        try:
            self._memory = mmap.mmap(self.descriptor, _NBYTES)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._numbers = np.frombuffer(self._memory, np.uint64, SLOTS)

    def take(self, number: int, nbytes: int) -> bytes | None:
        """Return a copy of the first `nbytes` of the contents of this number, and free their slot.

        Return None if the writer has not put such contents into a slot.
        """
        found = np.flatnonzero(self._numbers == number)
        if not number or not len(found) or nbytes > SLOT_BYTES:
            return None
        slot = int(found[0])
        start = _start(slot)
        contents = self._memory[start : start + nbytes]
        self._numbers[slot] = 0
        return contents

    def __del__(self) -> None:
        if hasattr(self, "_numbers"):  # otherwise the constructor has failed
            os.close(self.descriptor)


class SlotWriter:
    """The writer's end, which maps a descriptor of `SharedSlots`. The caller holds a lock during all calls.

    The constructor raises FrameError if the memory is not that of slots.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            if os.fstat(descriptor).st_size != _NBYTES:
                raise ValueError(f"they have {os.fstat(descriptor).st_size} bytes")
            self._memory = mmap.mmap(descriptor, _NBYTES)
        except (OSError, ValueError) as error:
            raise FrameError(f"shared slots cannot be mapped: {error}") from None
        self._numbers = np.frombuffer(self._memory, np.uint64, SLOTS)
        self._next = 0

    def has_space(self) -> bool:
        """Return whether a slot is free. May also be called without the lock, as an estimate."""
        return self._find() is not None

    def __setitem__(self, number: int, contents: bytes) -> None:
        """Put contents of at most `SLOT_BYTES` bytes into a free slot. Raise ValueError if no slot is free."""
        slot = self._find()
        if slot is None:
            raise ValueError("no slot for small contents is free")
        start = _start(slot)
        self._memory[start : start + len(contents)] = contents
        self._numbers[slot] = number  # last, since the reader looks for it
        self._next = (slot + 1) % SLOTS

    def pop(self, number: int, default: None = None) -> None:
        """Free the slot with the contents of this number, unless the reader has taken them."""
        self._numbers[self._numbers == number] = 0

    def _find(self) -> int | None:
        """Return a free slot. Most contents are taken in the order in which they were put."""
        if not self._numbers[self._next]:
            return self._next
        free = np.flatnonzero(self._numbers == 0)
        return int(free[0]) if len(free) else None


def _start(slot: int) -> int:
    return _TABLE_BYTES + slot * SLOT_BYTES
