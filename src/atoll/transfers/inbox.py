"""The feeds that have arrived at a host or may arrive, and the plans that await them.

Invariant: the memory of a feed is released exactly once, by the function that takes the feed, or here if none will.

A transfer that does not fit into its session's bound waits at its sender; it is not refused. Some transfers never wait,
because feeds that have arrived may need them: the feeds that a blocked plan awaits, and those of the session's oldest
launch. So a session holds at most the bound here, or the feeds of one launch if they are larger. A client can claim any
size and any launch, so its transfers that are admitted beyond the bound need free memory, and fail without it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from atoll.cluster.processes.process_table import has_memory_for
from atoll.errors import Code, Status, StatusError
from atoll.protocol.number_ranges import HOST_FEEDS
from atoll.transfers.failed_feeds import FailedFeeds, feeds_within
from atoll.transfers.receive_window import ReceiveWindow, Transfer
from atoll.transfers.transfer_engine import GROUP_ALIGNMENT, Group, nothing_to_release

_FIRST_HOST_FEED = HOST_FEEDS.start
# Bytes of one session's feeds. Transfers in chunks and files wait if they do not fit. Feeds that do not wait have a
# separate bound of the same size, and are refused beyond it.
MAX_INBOX_BYTES = 8 << 30
# Sessions that have ended, and whose bytes may still arrive from other hosts.
_REMEMBERED = 4096
# Ranges of one session's failed feeds, which may still arrive or be taken. The launches in a session's window have far
# fewer.
MAX_FAILED_FEEDS = 65_536
# For which a lack of memory is remembered.
_LACKS_SECONDS = 0.1


class InboxStatistics(msgspec.Struct, frozen=True):
    sessions: int
    feeds: int
    nbytes: int  # of feeds that have landed or may land
    waiting: int = 0  # transfers that do not fit yet


class Inbox:
    """Feeds by session and number, from clients and other hosts. Safe to use from any thread; nothing blocks.

    `on_arrival(session, feed)` is called for each feed of a client, on the thread that puts it, even if it failed.
    Feeds of other hosts, whose numbers the controller assigns, are awaited with `await_all`. `max_bytes` and
    `max_failed_feeds` are per session. `has_memory(nbytes)` returns whether this machine has so many bytes left.
    """

    def __init__(
        self,
        on_arrival: Callable[[int, int], None],
        max_bytes: int = MAX_INBOX_BYTES,
        max_failed_feeds: int = MAX_FAILED_FEEDS,
        has_memory: Callable[[int], bool] = has_memory_for,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_memory = has_memory
        self._now = now
        self._lacked = 0.0, 0  # until when, and how much memory was lacking
        self._max_bytes = max_bytes
        self._on_arrival = on_arrival
        self._feeds: dict[int, dict[int, tuple[Any, Callable[[], None]]]] = {}
        self._failed: defaultdict[int, FailedFeeds] = defaultdict(lambda: FailedFeeds(max_failed_feeds))  # by session
        self._awaited: dict[int, dict[int, tuple[set[int], Callable[[], None]]]] = {}  # by session and waiter
        self._lock = threading.Lock()
        # By session.
        self._windows: defaultdict[int, ReceiveWindow] = defaultdict(lambda: ReceiveWindow(max_bytes))
        self._ended: dict[int, None] = {}  # the sessions that ended last

    # ---- arrivals

    def admit(
        self,
        session: int,
        feed: int,
        nbytes: int,
        launch: int,
        grant: Callable[[], None],
        also: Sequence[int] = (),
        piece: object = None,
        refuse: Callable[[Status], None] | None = None,
    ) -> None:
        """Call `grant` once `nbytes` may land, now or later, on any thread. `put` or `withdraw` follows.

        `launch` is the same for feeds of a client that are needed together, and 0 for a feed that is needed by itself.
        If the transfer carries several feeds, `also` are their numbers, of which `feed` is the first. `piece`
        identifies the transfer, and replaces an earlier one of the same feed, which may have been on another channel.
        For a feed of a client, `refuse(status)` may be called instead of `grant`; the transfer is then forgotten.
        """
        is_of_client = feed < _FIRST_HOST_FEED
        launch = (launch or feed) if is_of_client else 0
        transfer = Transfer(nbytes, launch, grant, also, piece, refuse if is_of_client else None)
        with self._lock:
            self._windows[session].request(feed, transfer)
            granted = self._admit(session, (feed, *also))
        _call(granted)

    def withdraw(self, session: int, feed: int, piece: object = None) -> None:
        """Forget a transfer for which `admit` was called with this `piece`, and that will not arrive."""
        with self._lock:
            self._windows[session].withdraw_piece(feed, piece)
            granted = self._admit(session)
        _call(granted)

    def _admit(self, session: int, changed: Iterable[int] = ()) -> list[Callable[[], None]]:
        """Return the grants of transfers that may land after a change. The caller holds the lock.

        `changed` are feeds that were announced, are awaited, or have failed since the last call.
        """
        admission = self._windows.get(session)
        if admission is None:
            return []
        if admission.is_empty:
            del self._windows[session]
            return []
        if not admission.waiting:
            return []
        awaited, failed = self._awaited.get(session, {}), self._failed.get(session, ())
        return admission.admitted(
            changed,
            lambda feed: feed in failed or any(feed in missing for missing, _ in awaited.values()),
            session in self._ended,
            self._lacks_memory,
        )

    def _lacks_memory(self, nbytes: int) -> bool:
        """Return whether this machine lacks memory for `nbytes` and all that may land. The caller holds the lock.

        After a transfer was refused, those that need as much are refused for a moment, since a check takes long.
        """
        needed, now = nbytes + sum([window.landing for window in self._windows.values()]), self._now()
        until, lacked = self._lacked
        if needed >= lacked and now < until:
            return True
        if self._has_memory(needed):
            return False
        self._lacked = now + _LACKS_SECONDS, needed
        return True

    def put(self, session: int, feed: int, content: Any, done: Callable[[], None] = nothing_to_release) -> None:
        """Store a feed that has arrived, and call `done` once `content` has been read.

        `content` is a buffer or has `nbytes`. Raise StatusError if the client exceeds its session's bound.
        """
        with self._lock:
            unwanted = session in self._ended or feed in self._failed.get(session, ())
            admission = self._windows[session]
            if not unwanted and admission.unasked > self._max_bytes and not admission.is_landing(feed):
                text = _too_many(admission.held, session)
                if feed < _FIRST_HOST_FEED:
                    raise StatusError(Code.RESOURCE_EXHAUSTED, text)
                # An error would end the connection between hosts, which all sessions share.
                self._failed[session].add(feed, 1, Status(Code.RESOURCE_EXHAUSTED, text))
                unwanted = True
            if unwanted:
                admission.withdraw(feed)
            else:
                _, before = self._pop(session, feed) or (None, nothing_to_release)  # a peer may send a feed twice
                self._feeds.setdefault(session, {})[feed] = (content, done)
                admission.landed(feed, _nbytes(content))
            then = self._settle(session, range(feed, feed + 1))
            granted = self._admit(session, (feed,))
        _call(granted)
        (done if unwanted else before)()
        _call(then)
        if feed < _FIRST_HOST_FEED:
            self._on_arrival(session, feed)

    def put_group(self, session: int, group: Group, content: Any, done: Callable[[], None]) -> None:
        """Store several feeds of another host that have arrived in one piece, and call `done` once all were read.

        Each is stored as a view of the content, which its reader has to copy.
        """
        whole = memoryview(content).cast("B") if memoryview(content).nbytes else memoryview(b"")
        first, start = group[0][0], 0
        unread = _Unread(len(group), done)
        dropped: list[Callable[[], None]] = []
        with self._lock:
            is_over, failed = session in self._ended, self._failed.get(session, ())
            window = self._windows[session]
            was_asked = window.is_landing(first)
            refused = not was_asked and window.unasked > self._max_bytes
            window.withdraw(first)  # it lands now, feed by feed
            for feed, nbytes in group:
                part = whole[start : start + nbytes]
                start += -(-nbytes // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
                if is_over or feed in failed or refused:
                    dropped.append(unread.one_less)
                    continue
                before = self._pop(session, feed)  # a peer may send a feed twice
                if before is not None:
                    dropped.append(before[1])
                self._feeds.setdefault(session, {})[feed] = (part, unread.one_less)
                window.landed(feed, nbytes, was_asked)
            if refused and not is_over:
                status = Status(Code.RESOURCE_EXHAUSTED, _too_many(window.held, session))
                for feed, _ in group:
                    self._failed[session].add(feed, 1, status)
            feeds = [feed for feed, _ in group]
            then = self._settle(session, feeds)
            granted = self._admit(session, feeds)
        _call(granted)
        _call(dropped)
        _call(then)

    def put_failed(self, session: int, feed: int, status: Status) -> None:
        """Store a feed that has arrived without its bytes, so that `take` raises `status`."""
        self.fail(session, feed, 1, status)
        if feed < _FIRST_HOST_FEED:
            self._on_arrival(session, feed)

    def fail(self, session: int, first: int, count: int, status: Status) -> None:
        """Fail the `count` feeds from number `first` on, and discard them if they have arrived or still arrive."""
        with self._lock:
            if session in self._ended:
                return
            feeds = range(first, first + count)
            here = self._feeds.get(session, {})
            dropped = [self._pop(session, feed) for feed in feeds_within(feeds, here)]
            self._failed[session].add(first, count, status)
            then = self._settle(session, feeds)
            window = self._windows.get(session)
            granted = [] if window is None else self._admit(session, window.waiting_in(feeds))
        _call(granted)
        for each in dropped:
            if each is not None:
                each[1]()
        _call(then)

    def _settle(self, session: int, feeds: range | list[int]) -> Collection[Callable[[], None]]:
        """End the waits that are over. Return their callbacks, each once, because a callback handles all its waits."""
        awaited = self._awaited.get(session)
        if awaited is None:
            return ()
        found: dict[Callable[[], None], None] = {}
        for waiter, (missing, then) in list(awaited.items()):
            missing.difference_update(feeds_within(feeds, missing) if isinstance(feeds, range) else feeds)
            if not missing:
                del awaited[waiter]
                found[then] = None
        if not awaited:
            self._awaited.pop(session, None)
        return found

    # ---- waiting and taking

    def await_all(self, session: int, feeds: Iterable[int], then: Callable[[], None], waiter: int = 0) -> bool:
        """Return True if all feeds have arrived or failed. Otherwise call `then` once they have, on any thread.

        Each `waiter` of a session has one wait, which a new one replaces. If several waits with the same `then` end at
        once, it is called once.
        """
        with self._lock:
            here, failed = self._feeds.get(session, {}), self._failed.get(session, ())
            missing = {feed for feed in feeds if feed not in here and feed not in failed}
            if missing:
                self._awaited.setdefault(session, {})[waiter] = (missing, then)
            granted = self._admit(session, missing)
        _call(granted)
        return not missing

    def take(self, session: int, feed: int) -> tuple[Any, Callable[[], None]]:
        """Return a feed that has arrived, and a function to call when its memory has been read.

        Raise StatusError with the reason if the feed failed, or with INTERNAL if it has not arrived.
        """
        with self._lock:
            failed = self._failed.get(session)
            failure = None if failed is None else failed.get(feed)
            if failure is not None:
                raise failure.exception()
            found = self._pop(session, feed)
            if found is None:
                raise StatusError(Code.INTERNAL, f"feed {feed} of session {session} is not here")
            granted = self._admit(session)
        _call(granted)
        return found

    def take_all(self, session: int, feeds: Iterable[int]) -> dict[int, tuple[Any, Callable[[], None]]]:
        """Take several feeds, by number. If `take` raises StatusError for one, drop all of them and raise it."""
        wanted = dict.fromkeys(feeds)
        with self._lock:
            here = self._feeds.get(session, {})
            all_here = session not in self._failed and here.keys() >= wanted.keys()
            taken = {feed: here.pop(feed) for feed in wanted} if all_here else {}
            for feed in taken:
                self._windows[session].taken(feed)
            granted = self._admit(session) if taken else []
        _call(granted)
        if all_here:
            return taken
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

    # ---- dropping

    def drop(self, session: int, feed: int) -> None:
        """Free a feed that will not be taken."""
        try:
            _, done = self.take(session, feed)
        except StatusError:
            return  # it has failed, or its session has ended
        done()

    def drop_session(self, session: int) -> None:
        """Free all feeds of a session that has ended, and those that still arrive for it."""
        with self._lock:
            feeds = self._feeds.pop(session, {})
            self._failed.pop(session, None)
            self._awaited.pop(session, None)
            self._ended[session] = None
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
            for feed in feeds:
                self._windows[session].taken(feed)
            granted = self._admit(session)  # transfers that are under way land, and are dropped
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


def _call(granted: Iterable[Callable[[], None]]) -> None:
    for grant in granted:
        grant()


class _Unread:
    """Feeds that share a piece. `done` is called once all of them were read or dropped. Safe to use from any thread."""

    __slots__ = ("_done", "_left", "_lock")

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._left, self._done = count, done
        self._lock = threading.Lock()

    def one_less(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._done()


def _too_many(held: int, session: int) -> str:
    return f"{held} bytes of session {session} wait at this data port"


def _nbytes(content: Any) -> int:
    return content.nbytes if hasattr(content, "nbytes") else len(content)
