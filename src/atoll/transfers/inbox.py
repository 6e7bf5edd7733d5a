"""Feeds that have arrived at this host, and what waits for them: the one place where bytes are awaited.

Invariant: what a feed's memory holds is released exactly once: by who takes the feed, or here, where nobody will.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from atoll.errors import Code, Status, StatusError
from atoll.protocol.messages import INTERNAL_FEEDS
from atoll.transfers.failed_feeds import FailedFeeds
from atoll.transfers.receive_window import ReceiveWindow
from atoll.transfers.transfer_engine import nothing_to_release

# That one session may have waiting here: transfers in chunks, and files, wait for room. All others together are refused
# beyond as much again.
MAX_INBOX_BYTES = 8 << 30
# Sessions that have ended, whose bytes may still be on their way from other hosts.
_REMEMBERED = 4096
# Failed feeds of one session, in ranges, whose bytes may still be on their way, or which may still be asked for: many
# times what the launches in its window have.
MAX_FAILED_FEEDS = 65_536


@dataclass(frozen=True)
class InboxStatistics:
    """What waits here now."""

    sessions: int
    feeds: int
    nbytes: int  # of what has landed, or may
    waiting: int = 0  # transfers for which there is no room yet


class Inbox:
    """Feeds by session and number, from clients and from other hosts. For any thread; nothing here blocks.

    `on_arrival(session, feed)` is called for each feed of a client, on the thread that puts it, also where it failed.
    Feeds of other hosts, whose numbers are the controller's own, are awaited by `await_all`.
    """

    def __init__(self, on_arrival: Callable[[int, int], None]) -> None:
        self._on_arrival = on_arrival
        self._feeds: dict[int, dict[int, tuple[Any, Callable[[], None]]]] = {}
        self._failed: defaultdict[int, FailedFeeds] = defaultdict(lambda: FailedFeeds(MAX_FAILED_FEEDS))  # by session
        self._awaited: dict[int, dict[int, tuple[set[int], Callable[[], None]]]] = {}  # by session, and who awaits
        self._lock = threading.Lock()
        # by session
        self._windows: defaultdict[int, ReceiveWindow] = defaultdict(lambda: ReceiveWindow(MAX_INBOX_BYTES))
        self._ended: dict[int, None] = {}  # the sessions that ended last

    # ---- arrivals

    def admit(self, session: int, feed: int, nbytes: int, launch: int, grant: Callable[[], None]) -> None:
        """Calls `grant` once so many bytes may land here, now or later, on any thread: `put` or `withdraw` follows.

        `launch` is the same for feeds of a client that are needed together; 0: it is needed alone.
        """
        with self._lock:
            launch = (launch or feed) if feed < INTERNAL_FEEDS else 0
            self._windows[session].request(feed, nbytes, launch, grant)
            granted = self._admit(session)
        _call(granted)

    def withdraw(self, session: int, feed: int) -> None:
        """A transfer for which `admit` was called will not arrive."""
        with self._lock:
            self._windows[session].withdraw(feed)
            granted = self._admit(session)
        _call(granted)

    def _admit(self, session: int) -> list[Callable[[], None]]:
        """What may land, now that something has changed. The caller has the lock."""
        admission = self._windows.get(session)
        if admission is None:
            return []
        if admission.is_empty:
            del self._windows[session]
            return []
        if not admission.waiting:
            return []
        awaited = [missing for missing, _ in self._awaited.get(session, {}).values()]
        failed = self._failed.get(session, ())
        return admission.admitted(
            lambda feed: feed in failed or any(feed in missing for missing in awaited), session in self._ended
        )

    def put(self, session: int, feed: int, content: Any, done: Callable[[], None] = nothing_to_release) -> None:
        """A feed has arrived, in a buffer or in what knows its `nbytes`; `done` is called when that has been read.

        Raises StatusError where a client sends more than its session may have waiting here.
        """
        with self._lock:
            unwanted = session in self._ended or feed in self._failed.get(session, ())
            admission = self._windows[session]
            if not unwanted and admission.unasked > MAX_INBOX_BYTES and not admission.is_landing(feed):
                text = f"{admission.held} bytes of session {session} wait at this data port"
                if feed < INTERNAL_FEEDS:
                    raise StatusError(Code.RESOURCE_EXHAUSTED, text)
                # All sessions share the connections between hosts: this must not end one.
                self._failed[session].add(feed, 1, Status(Code.RESOURCE_EXHAUSTED, text))
                unwanted = True
            if unwanted:
                admission.withdraw(feed)
            else:
                _, before = self._pop(session, feed) or (None, nothing_to_release)  # a peer may send one twice
                self._feeds.setdefault(session, {})[feed] = (content, done)
                admission.landed(feed, _nbytes(content))
            then = self._settle(session, range(feed, feed + 1))
            granted = self._admit(session)
        _call(granted)
        (done if unwanted else before)()
        if then is not None:
            then()
        if feed < INTERNAL_FEEDS:
            self._on_arrival(session, feed)

    def put_failed(self, session: int, feed: int, status: Status) -> None:
        """A feed has arrived without its bytes: who takes it gets `status`."""
        self.fail(session, feed, 1, status)
        if feed < INTERNAL_FEEDS:
            self._on_arrival(session, feed)

    def fail(self, session: int, first: int, count: int, status: Status) -> None:
        """So many feeds, from number `first` on, will not arrive, or are for nobody if they do."""
        with self._lock:
            if session in self._ended:
                return
            feeds = range(first, first + count)
            here = self._feeds.get(session, {})
            dropped = [self._pop(session, feed) for feed in _within(feeds, here)]
            self._failed[session].add(first, count, status)
            then = self._settle(session, feeds)
            granted = self._admit(session)
        _call(granted)
        for each in dropped:
            if each is not None:
                each[1]()
        if then is not None:
            then()

    def _settle(self, session: int, feeds: range) -> Callable[[], None] | None:
        """One call for all that now have what they awaited: it looks at all of them."""
        awaited = self._awaited.get(session, {})
        found = None
        for who, (missing, then) in list(awaited.items()):
            missing.difference_update(_within(feeds, missing))
            if not missing:
                del awaited[who]
                found = then
        if not awaited:
            self._awaited.pop(session, None)
        return found

    # ---- waiting and taking

    def await_all(self, session: int, feeds: Iterable[int], then: Callable[[], None], who: int = 0) -> bool:
        """True where all have arrived, or are known not to; otherwise calls `then` once they have, on any thread.

        One wait for each `who` of a session: a new one replaces the one before. `then` is the same for all.
        """
        with self._lock:
            here, failed = self._feeds.get(session, {}), self._failed.get(session, ())
            missing = {feed for feed in feeds if feed not in here and feed not in failed}
            if missing:
                self._awaited.setdefault(session, {})[who] = (missing, then)
            granted = self._admit(session)
        _call(granted)
        return not missing

    def take(self, session: int, feed: int) -> tuple[Any, Callable[[], None]]:
        """A feed that has arrived, and what to call when its memory has been read.

        Raises StatusError: why it did not arrive, or INTERNAL where it is not here.
        """
        with self._lock:
            failed = self._failed.get(session)
            failure = None if failed is None else failed.get(feed)
            if failure is not None:
                raise StatusError(Code(failure.code), failure.message, failure.payloads)
            found = self._pop(session, feed)
            if found is None:
                raise StatusError(Code.INTERNAL, f"feed {feed} of session {session} is not here")
            granted = self._admit(session)
        _call(granted)
        return found

    def take_all(self, session: int, feeds: Iterable[int]) -> dict[int, tuple[Any, Callable[[], None]]]:
        """These feeds, by number, as `take` gives them. Raises StatusError as `take` does; then none of them stays."""
        wanted = dict.fromkeys(feeds)
        taken: dict[int, tuple[Any, Callable[[], None]]] = {}
        try:
            for feed in wanted:
                taken[feed] = self.take(session, feed)
        except StatusError:
            for _, done in taken.values():
                done()
            for feed in wanted.keys() - taken.keys():
                self.drop(session, feed)
            raise
        return taken

    def _pop(self, session: int, feed: int) -> tuple[Any, Callable[[], None]] | None:
        found = self._feeds.get(session, {}).pop(feed, None)
        if found is not None:
            self._windows[session].taken(feed)
        return found

    # ---- nobody takes them

    def drop(self, session: int, feed: int) -> None:
        """Nobody will take the feed."""
        try:
            _, done = self.take(session, feed)
        except StatusError:
            return  # it has failed, or its session has ended
        done()

    def drop_session(self, session: int) -> None:
        """The session has ended: what it has here is freed, and what still arrives for it."""
        with self._lock:
            feeds = self._feeds.pop(session, {})
            self._failed.pop(session, None)
            self._awaited.pop(session, None)
            self._ended[session] = None
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
            for feed in feeds:
                self._windows[session].taken(feed)
            granted = self._admit(session)  # what is under way lands, and is dropped
        _call(granted)
        for _, done in feeds.values():
            done()

    @property
    def nbytes(self) -> int:
        return self.statistics().nbytes

    def statistics(self) -> InboxStatistics:
        with self._lock:
            feeds = sum(map(len, self._feeds.values()))
            admissions = self._windows.values()
            held, waiting = sum(each.held for each in admissions), sum(each.waiting for each in admissions)
            return InboxStatistics(len(self._feeds), feeds, held, waiting)


def _within(feeds: range, some: Collection[int]) -> list[int]:
    """Those of some feeds that are in a range, whichever of the two is shorter."""
    return [feed for feed in some if feed in feeds] if len(some) < len(feeds) else [f for f in feeds if f in some]


def _call(granted: Iterable[Callable[[], None]]) -> None:
    for grant in granted:
        grant()


def _nbytes(content: Any) -> int:
    return content.nbytes if hasattr(content, "nbytes") else len(content)
