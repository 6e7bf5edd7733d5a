"""The contents that the hosts of a session send to the client, from the launch that sends them until they are read.

No I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from atoll.cluster.state_machine import StateMachine
from atoll.errors import OK, Code, Details, Kind, Status, StatusError, failure
from atoll.session.session_interfaces import ReplyFuture


class DownloadState(enum.Enum):
    EXPECTED = "expected"  # no contents have arrived
    ARRIVING = "arriving"  # some contents have arrived
    STORED = "stored"  # all contents have arrived
    SERVED = "served"  # the client does not fetch them any more, so the rest is discarded
    FAILED = "failed"  # the rest will not arrive


_S = DownloadState
# The states that may follow each state. The comments name the methods of `Download` that cause the transitions.
TRANSITIONS: Mapping[DownloadState, frozenset[DownloadState]] = {
    # `take`; `fail`; `drop`
    _S.EXPECTED: frozenset({_S.ARRIVING, _S.STORED, _S.FAILED, _S.SERVED}),
    # `take` of the last part; `fail`; `drop`
    _S.ARRIVING: frozenset({_S.STORED, _S.FAILED, _S.SERVED}),
    # `drop`
    _S.STORED: frozenset({_S.SERVED}),
    _S.FAILED: frozenset({_S.SERVED}),
    _S.SERVED: frozenset(),
}
_OPEN = (DownloadState.EXPECTED, DownloadState.ARRIVING)


class Download(StateMachine[DownloadState]):
    """The contents of an array on `devices`, of `nbytes` bytes, which hosts send as the feed with number `feed`.

    Parts can be read while later parts arrive. Each part has a function to call when its memory may be reused.
    `on_start` is called once, when the download leaves the state EXPECTED, unless the client drops it before.
    """

    __slots__ = (
        *("contents", "devices", "feed", "nbytes", "senders", "state", "status"),
        *("_decode", "_dones", "_make_future", "_on_start", "_released", "_waiting"),
    )
    transitions = TRANSITIONS
    descriptor = -1  # contents are in memory and not in a file

    def __init__(
        self,
        feed: int,
        devices: Sequence[int],
        nbytes: int,
        make_future: Callable[[], ReplyFuture],
        on_start: Callable[[Download], None] | None = None,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        self.feed = feed
        self.devices = devices
        self.nbytes = nbytes
        self.state: DownloadState = DownloadState.EXPECTED
        self.status = OK
        self.senders: Collection[int] = ()  # the hosts that have reported that they have sent everything
        self.contents: list[Any] = []
        self._on_start = on_start
        self._decode = decode
        self._make_future = make_future
        self._dones: list[Callable[[], None]] = []
        self._released = 0  # parts whose memory was released
        self._waiting: list[ReplyFuture] = []

    # ---- from the hosts

    def take(self, content: Any, more: bool, done: Callable[[], None]) -> None:
        """Add a part. Call `done` when it has been read."""
        if self.state not in _OPEN:
            done()
            return
        self.contents.append(content if self._decode is None else self._decode(content))
        self._dones.append(done)
        self._move(DownloadState.ARRIVING if more else DownloadState.STORED)

    def fail(self, status: Status) -> None:
        """Fail the download, unless everything has arrived or the client does not fetch it any more."""
        if self.state in _OPEN:
            self.status = status
            self._move(DownloadState.FAILED)

    # ---- to the client

    async def part(self, index: int) -> Any | None:
        """Return part number `index` once it has arrived, or None after the last. Raise the download's error."""
        while index >= len(self.contents):
            if self.state not in _OPEN:
                self.status.raise_if_error()
                return None
            self._waiting.append(self._make_future())
            await self._waiting[-1]
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
        """Release the memory of all parts. The client fetches nothing more."""
        dones, self._dones = self._dones[self._released :], []
        self.contents = []
        self._on_start = None
        self._move(DownloadState.SERVED)
        for done in dones:
            done()

    def _described(self) -> str:
        return f"the download of feed {self.feed}"

    def _move(self, state: DownloadState) -> None:
        if state is not self.state:
            self.enter(state)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        on_start, self._on_start = self._on_start, None
        if on_start is not None:
            on_start(self)


class DirectDownload:
    """Contents that a host sends to the client's process, with the same life as a `Download`.

    `on_fail(status)` is called if they do not arrive. Contents that bypass the proxy (`may_bypass`) count as arrived
    when the host has sent them, because they are then in memory of this machine.
    """

    __slots__ = ("_on_fail", "devices", "feed", "may_bypass", "senders")

    def __init__(
        self, feed: int, devices: Sequence[int], on_fail: Callable[[Status], None], may_bypass: bool = False
    ) -> None:
        self.feed = feed
        self.devices = devices[:1]  # whose host sends the contents
        self.may_bypass = may_bypass
        self.senders: Collection[int] = ()
        self._on_fail = on_fail

    def take(self, content: Any, more: bool, done: Callable[[], None]) -> None:
        """Note that a part has been forwarded."""
        done()

    def fail(self, status: Status) -> None:
        self._on_fail(status)


class Downloads:
    """The downloads of a session whose feeds have not arrived. Use it on the session's thread, except for `any`.

    Invariant: each feed arrives completely or its download fails; exactly one of these happens, once.

    A host's report that it has sent a feed does not travel with the contents. If the host fails after the report, while
    contents are on the way, no gang is left that could fail: `hosts_failed` fails the download.
    """

    def __init__(self) -> None:
        self._downloads: dict[int, Download | DirectDownload] = {}  # by feed

    def any(self) -> bool:
        """Return whether contents are expected. Thread-safe."""
        return bool(self._downloads)

    def expect(self, download: Download | DirectDownload) -> None:
        """Pass the parts of the download's feed to it."""
        self._downloads[download.feed] = download

    def take(self, feed: int, content: Any, more: bool, done: Callable[[], None]) -> None:
        """Take a part of a feed that has arrived. See `session_interfaces.OnFeed`."""
        download = self._downloads.get(feed)
        if download is None:
            done()
            return
        if not more:
            del self._downloads[feed]
        download.take(content, more, done)

    def sent(self, download: Download | DirectDownload, hosts: Collection[int]) -> None:
        """Note that `hosts` have sent everything. If one of them fails before it has arrived, the download fails."""
        download.senders = hosts

    def end(self, feed: int) -> None:
        """Stop to expect contents that bypass the proxy."""
        if isinstance(self._downloads.get(feed), DirectDownload):
            del self._downloads[feed]

    def fail(self, download: Download | DirectDownload, status: Status) -> None:
        """Fail a download whose feed will not arrive, unless it has arrived."""
        if self._downloads.pop(download.feed, None) is not None:
            download.fail(status)

    def fail_all(self, status: Status) -> None:
        """Fail all downloads, because the session has ended."""
        for download in list(self._downloads.values()):
            self.fail(download, status)

    def hosts_failed(self, hosts: Iterable[int]) -> None:
        """Fail the downloads whose contents were still on the way from failed hosts."""
        failed = set(hosts)
        for download in list(self._downloads.values()):
            if not failed.isdisjoint(download.senders):
                gone = tuple(sorted(failed.intersection(download.senders)))
                names = ", ".join(map(str, gone))
                text = f"host {names} is gone, and data that it had sent to the client was still on the way"
                details = Details(Kind.LINK, hosts=gone, retriable=True)
                self.fail(download, failure(Code.DATA_LOSS, text, details))
