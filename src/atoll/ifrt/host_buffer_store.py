"""The host buffer store, which holds bytes that are sent between the client and the workers.

A buffer may arrive before or after the request that uses it, and is forwarded when both have arrived. So a slow buffer
delays only its own array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import Code, StatusError, not_found
from atoll.session.downloads import Download

MAX_STORED_BYTES = 16 << 30


class StoredUpload:
    """A buffer that the client has sent: parts in memory, or `nbytes` of a file."""

    __slots__ = ("contents", "descriptor", "nbytes")

    def __init__(self, contents: Sequence[Any], nbytes: int, descriptor: int = -1) -> None:
        self.contents = contents
        self.nbytes = nbytes
        self.descriptor = descriptor

    async def part(self, index: int) -> Any | None:
        """Return part number `index`, or None after the last."""
        return self.contents[index] if index < len(self.contents) else None

    def release(self, count: int) -> None:
        """Keep the parts, because the request that uses them may follow."""

    def drop(self) -> None:
        """Release the memory or the file."""
        self.contents = ()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


Stored = StoredUpload | Download


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

    def take_small(self, handle: int, limit: int) -> StoredUpload | None:
        """Remove and return an upload of at most `limit` bytes that has arrived, or return None."""
        stored = self._stored.get(handle)
        if not isinstance(stored, StoredUpload) or stored.descriptor >= 0 or stored.nbytes > limit:
            return None
        del self._stored[handle]
        self._bytes -= stored.nbytes
        return stored

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
