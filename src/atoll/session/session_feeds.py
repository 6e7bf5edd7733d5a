"""The feeds of a session: the downloads that it expects of its hosts, and the latest uploads, which it may send again.

No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from atoll.errors import Code, Details, Kind, Status, failure
from atoll.protocol.messages import MOST_FEEDS_NAMED
from atoll.transfers.transfer_engine import Contents

KEPT_BYTES = 64 << 20

# Contents, whether more will follow, and what to call when they have been read.
OnData = Callable[[Any, bool, Callable[[], None]], None]
OnLost = Callable[[Status], None]


class Downloads:
    """The contents that a session expects of its hosts, by feed. Use it on the session's thread, except for `any`.

    Invariant: each expected feed arrives completely, is forgotten, or is lost; exactly one of these happens, once.

    A host's report that it has sent a feed does not travel with the contents. If the host fails after the report, while
    contents are on the way, no gang is left that could fail: `hosts_failed` reports the loss.
    """

    def __init__(self) -> None:
        self._expected: dict[int, OnData] = {}
        self._sent: dict[int, tuple[Collection[int], OnLost]] = {}  # the senders of complete feeds, and the callback

    def any(self) -> bool:
        """Return whether contents are expected. Thread-safe."""
        return bool(self._expected)

    def expect(self, feed: int, then: OnData) -> None:
        """Call `then` with each part of `feed` that a host sends."""
        self._expected[feed] = then

    def expects(self, feed: int) -> bool:
        """Return whether the rest of the feed may still arrive."""
        return feed in self._expected

    def sent(self, feed: int, hosts: Collection[int], lost: OnLost) -> None:
        """Note that `hosts` have sent the feed. Call `lost` if one of them fails before the feed has arrived."""
        self._sent[feed] = hosts, lost

    def forget(self, feed: int) -> None:
        """Stop expecting the feed."""
        self._expected.pop(feed, None)
        self._sent.pop(feed, None)

    def take(self, feed: int, content: Any, more: bool, done: Callable[[], None]) -> None:
        """Take a part of a feed that has arrived. See `session_interfaces.OnFeed`."""
        then = self._expected.get(feed)
        if then is None:
            done()
            return
        if not more:
            self.forget(feed)
        then(content, more, done)

    def hosts_failed(self, hosts: Iterable[int]) -> None:
        """Report the loss of sent feeds that were still on the way from failed hosts."""
        failed = set(hosts)
        broken = [(feed, by, lost) for feed, (by, lost) in self._sent.items() if not failed.isdisjoint(by)]
        for feed, by, lost in broken:
            self.forget(feed)
            gone = tuple(sorted(failed.intersection(by)))
            names = ", ".join(map(str, gone))
            text = f"host {names} is gone, and data that it had sent to the client was still on the way"
            lost(failure(Code.DATA_LOSS, text, Details(Kind.LINK, hosts=gone, retriable=True)))


class Upload(NamedTuple):
    """The contents of a feed for a host. `file` owns the descriptor of contents in a file; None if in memory."""

    contents: Contents
    file: object | None


class SentUploads:
    """The latest uploads for launches, by host and feed. If a host fails before it has used one, it is sent again.

    No message tells a proxy that a host has used an upload. So a session keeps uploads until none of its launches is in
    flight: the latest `most` uploads that fit into `most_bytes`, since the acknowledgement of a loss cannot name more
    feeds. An upload that is larger than `most_bytes` is kept until its host has received it.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES, most: int = MOST_FEEDS_NAMED) -> None:
        self._most_bytes = most_bytes
        self._most = most
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
        while self._nbytes > self._most_bytes or len(uploads) > self._most:
            self._nbytes -= uploads.pop(next(iter(uploads))).contents.nbytes

    def is_large(self, nbytes: int) -> bool:
        """Return whether an upload of so many bytes is kept only while it is being sent."""
        return nbytes > self._most_bytes

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
