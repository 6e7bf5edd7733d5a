"""The host buffer store: bytes on their way between the client and the workers.

Buffers may come before or after the request that uses them. A request says where its buffer is to go; whichever
of the two comes second sends it on, so that a slow buffer delays nobody but its own array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import Code, StatusError, not_found

MAX_STORED_BYTES = 16 << 30


@dataclass(slots=True)
class Stored:
    """A buffer: bytes in memory, or `nbytes` of a file. `done` is called when its memory may be used again."""

    contents: Sequence[Any]
    nbytes: int
    descriptor: int = -1
    done: Callable[[], None] | None = None

    def drop(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        if self.done is not None:
            self.done()


class HostBuffers:
    """A session's buffers by handle."""

    def __init__(self) -> None:
        self._stored: dict[int, Stored] = {}
        self._wanted: dict[int, Callable[[Stored], None]] = {}
        self._bytes = 0

    def put(self, handle: int, stored: Stored) -> None:
        """A buffer has come. Raises where the session holds too much."""
        wanted = self._wanted.pop(handle, None)
        if wanted is not None:
            wanted(stored)
            return
        if self._bytes + stored.nbytes > MAX_STORED_BYTES:
            stored.drop()
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"over {MAX_STORED_BYTES >> 30} GiB of host buffers")
        previous = self._stored.pop(handle, None)
        if previous is not None:
            self._bytes -= previous.nbytes
            previous.drop()
        self._stored[handle] = stored
        self._bytes += stored.nbytes

    def consume(self, handle: int, then: Callable[[Stored], None]) -> None:
        """Gives the buffer to `then`, now or when it comes; it is no longer in the store."""
        stored = self._stored.pop(handle, None)
        if stored is None:
            self._wanted[handle] = then
            return
        self._bytes -= stored.nbytes
        then(stored)

    def read(self, handle: int) -> Stored:
        stored = self._stored.get(handle)
        if stored is None:
            raise not_found(f"unknown host buffer {handle}")
        return stored

    def delete(self, handle: int) -> None:
        stored = self._stored.pop(handle, None)
        if stored is None:
            raise not_found(f"unknown host buffer {handle}")
        self._bytes -= stored.nbytes
        stored.drop()

    def close(self) -> None:
        for stored in self._stored.values():
            stored.drop()
        self._stored.clear()
        self._wanted.clear()

    @property
    def nbytes(self) -> int:
        return self._bytes
