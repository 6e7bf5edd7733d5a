"""The latest uploads of a session: if a host fails that has not used an upload, the session sends the upload again.

No message tells a proxy that a host has used an upload. So a session keeps uploads until none of its launches is in
flight, within a bound. No I/O.
"""

from __future__ import annotations

from typing import NamedTuple

from atoll.protocol.messages import MOST_FEEDS_NAMED
from atoll.transfers.transfer_engine import Contents

KEPT_BYTES = 64 << 20


class Upload(NamedTuple):
    """`file` owns the descriptor that the contents are read from; None if they are in memory."""

    contents: Contents
    file: object | None


class SentUploads:
    """The uploads that are for launches, by host and feed.

    The latest `most` that fit into `most_bytes` are kept: an acknowledgement of a loss can name no more. A larger one
    is kept until its host has all of it.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES, most: int = MOST_FEEDS_NAMED) -> None:
        self._most_bytes = most_bytes
        self._most = most
        self._nbytes = 0
        self._uploads: dict[tuple[int, int], Upload] = {}
        self._large: dict[tuple[int, int], Upload] = {}

    def add(self, host: int, feed: int, upload: Upload) -> None:
        """Keep an upload. Drop the oldest ones if the limits are exceeded."""
        nbytes = upload.contents.nbytes
        if self.is_large(nbytes):
            self._large[host, feed] = upload
            return
        uploads = self._uploads
        uploads[host, feed] = upload
        self._nbytes += nbytes
        while self._nbytes > self._most_bytes or len(uploads) > self._most:
            self._nbytes -= uploads.pop(next(iter(uploads))).contents.nbytes

    def is_large(self, nbytes: int) -> bool:
        """Return whether an upload of so many bytes is kept only while it is being sent."""
        return nbytes > self._most_bytes

    def landed(self, host: int, feed: int) -> None:
        """Drop a large upload: its host has all of it."""
        self._large.pop((host, feed), None)

    def of_host(self, host: int) -> dict[int, Upload]:
        """Return the uploads to a host that are kept, by feed."""
        return {feed: each for kept in (self._uploads, self._large) for (to, feed), each in kept.items() if to == host}

    def clear(self) -> None:
        """Drop all uploads: no launch of the session is in flight."""
        self._uploads.clear()
        self._large.clear()
        self._nbytes = 0

    def statistics(self) -> tuple[int, int]:
        """Return the number of uploads that are kept, and their bytes without those of large ones."""
        return len(self._uploads) + len(self._large), self._nbytes
