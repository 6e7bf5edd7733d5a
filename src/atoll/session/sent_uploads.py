"""The latest uploads of a session, which it may send again. No I/O."""

from __future__ import annotations

from typing import NamedTuple

from atoll.protocol.messages import MAX_FEEDS_NAMED
from atoll.transfers.transfer_engine import Contents

KEPT_BYTES = 64 << 20


class Upload(NamedTuple):
    """The contents of a feed for a host. `file` owns the descriptor of contents in a file; None if in memory."""

    contents: Contents
    file: object | None


class SentUploads:
    """The latest uploads for launches, by host and feed. If a host fails before it has used one, it is sent again.

    No message tells a proxy that a host has used an upload. So a session keeps uploads until none of its launches is in
    flight: the latest `limit` uploads that fit into `max_bytes`, since the acknowledgement of a loss cannot name more
    feeds. An upload that is larger than `max_bytes` is kept until its host has received it.
    """

    def __init__(self, max_bytes: int = KEPT_BYTES, limit: int = MAX_FEEDS_NAMED) -> None:
        self._max_bytes = max_bytes
        self._limit = limit
        self._nbytes = 0
        self._uploads: dict[tuple[int, int], Upload] = {}
        self._large: dict[tuple[int, int], Upload] = {}

    def add(self, host: int, feed: int, upload: Upload) -> None:
        """Keep an upload. Drop the oldest uploads beyond the limits."""
        nbytes = upload.contents.nbytes
        if self.is_large(nbytes):
            self._large[host, feed] = upload
            return
        uploads = self._uploads
        uploads[host, feed] = upload
        self._nbytes += nbytes
        while self._nbytes > self._max_bytes or len(uploads) > self._limit:
            self._nbytes -= uploads.pop(next(iter(uploads))).contents.nbytes

    def is_large(self, nbytes: int) -> bool:
        """Return whether an upload of so many bytes is kept only while it is being sent."""
        return nbytes > self._max_bytes

    def landed(self, host: int, feed: int) -> None:
        """Drop a large upload, because its host has received it."""
        self._large.pop((host, feed), None)

    def of_host(self, host: int) -> dict[int, Upload]:
        """Return the kept uploads to a host, by feed."""
        return {feed: each for kept in (self._uploads, self._large) for (to, feed), each in kept.items() if to == host}

    def clear(self) -> None:
        """Drop all uploads, because no launch of the session is in flight."""
        self._uploads.clear()
        self._large.clear()
        self._nbytes = 0

    def statistics(self) -> tuple[int, int]:
        """Return the number of kept uploads, and their bytes without large uploads."""
        return len(self._uploads) + len(self._large), self._nbytes
