"""The host buffer store, which holds bytes that are sent between the client and the workers.

A buffer may arrive before or after the request that uses it, and is forwarded when both have arrived. So a slow buffer
delays only its own array.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import OK, Code, Status, StatusError, not_found

MAX_STORED_BYTES = 16 << 30


class Stored:
    """A buffer, which is parts in memory or `nbytes` of a file. Until it is complete, parts are added, or it fails.

    Each added part has a function to call when its memory may be reused.
    """

    __slots__ = ("_changed", "_dones", "_released", "complete", "contents", "descriptor", "nbytes", "status")

    def __init__(self, contents: Sequence[Any], nbytes: int, descriptor: int = -1, *, complete: bool = True) -> None:
        self.contents: list[Any] = list(contents)
        self.nbytes = nbytes
        self.descriptor = descriptor
        self.complete = complete
        self.status = OK
        self._dones: list[Callable[[], None]] = []
        self._released = 0  # parts whose memory was released
        self._changed = asyncio.Event()

    def add(self, content: Any, done: Callable[[], None]) -> None:
        self.contents.append(content)
        self._dones.append(done)
        self._changed.set()

    def finish(self, status: Status = OK) -> None:
        """Complete the buffer, or fail it."""
        self.complete = True
        self.status = status
        self._changed.set()

    async def part(self, index: int) -> Any | None:
        """Return part number `index` once it has arrived, or None after the last. Raise the buffer's error."""
        while index >= len(self.contents):
            if self.complete:
                self.status.raise_if_error()
                return None
            self._changed.clear()
            await self._changed.wait()
        if index < self._released:
            raise StatusError(Code.FAILED_PRECONDITION, "the contents of an array can be fetched only once")
        return self.contents[index]

    def release(self, count: int) -> None:
        """Release the memory of the first `count` parts, which have been sent to the client."""
        for index in range(self._released, min(count, len(self._dones))):
            self.contents[index] = b""
            self._dones[index]()
            self._released = index + 1

    def drop(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        dones, self._dones = self._dones[self._released :], []
        self.contents = []
        self.complete = True
        self._changed.set()
        for done in dones:
            done()


class HostBuffers:
    """The host buffers of one session, by handle."""

    def __init__(self) -> None:
        self._stored: dict[int, Stored] = {}
        self._wanted: dict[int, Callable[[Stored], None]] = {}
        self._bytes = 0

    def put(self, handle: int, stored: Stored) -> None:
        """Store a buffer, or pass it to the request that waits for it.

        Raise RESOURCE_EXHAUSTED if the session holds too many bytes.
        """
        wanted = self._wanted.pop(handle, None)
        if wanted is not None:
            wanted(stored)
            return
        if self._bytes + stored.nbytes > MAX_STORED_BYTES:
            stored.drop()
            raise StatusError(
                Code.RESOURCE_EXHAUSTED, f"the session holds more than {MAX_STORED_BYTES >> 30} GiB of host buffers"
            )
        previous = self._stored.pop(handle, None)
        if previous is not None:
            self._bytes -= previous.nbytes
            previous.drop()
        self._stored[handle] = stored
        self._bytes += stored.nbytes

    def consume(self, handle: int, then: Callable[[Stored], None]) -> None:
        """Pass the buffer to `then`, now or when it arrives, and remove it from the store."""
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
