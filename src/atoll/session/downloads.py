"""The contents that a session expects of its hosts, by feed.

Invariant: a feed that is expected comes whole, is forgotten, or is lost: one of these, once. Contents and the word that
their hosts have done their part go different ways: where a host fails after that word, with contents on their way, no
gang of it is left that could fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from atoll.errors import Code, Status

# Contents, whether more will follow, and what to call when they have been read.
OnData = Callable[[Any, bool, Callable[[], None]], None]
OnLost = Callable[[Status], None]


class Downloads:
    """What is expected. All methods run on the session's thread, but for `any`."""

    def __init__(self) -> None:
        self._expected: dict[int, OnData] = {}
        self._sent: dict[int, tuple[Collection[int], OnLost]] = {}  # of these, by whom, and whom to tell

    def any(self) -> bool:
        """Whether contents are awaited. On any thread."""
        return bool(self._expected)

    def expect(self, feed: int, then: OnData) -> None:
        """Calls `then` with each part of what a host sends as `feed`."""
        self._expected[feed] = then

    def expects(self, feed: int) -> bool:
        """Whether it has not come whole, and may."""
        return feed in self._expected

    def sent(self, feed: int, hosts: Collection[int], lost: OnLost) -> None:
        """These hosts have sent it. Calls `lost` where one of them is lost before it has come whole."""
        self._sent[feed] = hosts, lost

    def forget(self, feed: int) -> None:
        """It will not come."""
        self._expected.pop(feed, None)
        self._sent.pop(feed, None)

    def take(self, feed: int, content: Any, more: bool, done: Callable[[], None]) -> None:
        """A part of a feed has come. See `connection.OnFeed`."""
        then = self._expected.get(feed)
        if then is None:
            done()
            return
        if not more:
            self.forget(feed)
        then(content, more, done)

    def hosts_failed(self, hosts: Iterable[int]) -> None:
        """There is no channel to them any more: what is on its way does not come."""
        gone = set(hosts)
        broken = [(feed, by, lost) for feed, (by, lost) in self._sent.items() if not gone.isdisjoint(by)]
        for feed, by, lost in broken:
            self.forget(feed)
            names = ", ".join(str(host) for host in sorted(gone.intersection(by)))
            text = f"host {names} is gone, and what it had sent to the client was still on its way"
            lost(Status(Code.DATA_LOSS, text))
