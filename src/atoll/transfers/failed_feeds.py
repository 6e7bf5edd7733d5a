"""The failed feeds of a session, in a bounded number of ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection

from atoll.errors import Status


class FailedFeeds:
    """Failed feeds of one session: the latest `limit` ranges of numbers, each with its reason.

    A new range replaces those that it contains, and is ignored if another one contains it. Ranges are disjoint.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ranges: dict[int, tuple[int, Status]] = {}  # by first number, with the stop; the oldest first
        self._firsts: list[int] = []  # sorted

    def add(self, first: int, count: int, status: Status) -> None:
        """Add `count` numbers from `first` on."""
        stop = first + count
        holder = self._range_of(first)
        if count < 1 or (holder is not None and holder[0] >= stop):
            return
        for within in self._firsts[bisect_left(self._firsts, first) : bisect_left(self._firsts, stop)]:
            self._remove(within)
        self._ranges[first] = (stop, status)
        insort(self._firsts, first)
        if len(self._ranges) > self._limit:
            self._remove(next(iter(self._ranges)))

    def get(self, feed: int) -> Status | None:
        found = self._range_of(feed)
        return None if found is None else found[1]

    def __contains__(self, feed: object) -> bool:
        return isinstance(feed, int) and self._range_of(feed) is not None

    def __len__(self) -> int:
        return len(self._ranges)

    def _range_of(self, feed: int) -> tuple[int, Status] | None:
        index = bisect_right(self._firsts, feed) - 1
        if index < 0:
            return None
        found = self._ranges[self._firsts[index]]
        return found if feed < found[0] else None

    def _remove(self, first: int) -> None:
        del self._ranges[first]
        del self._firsts[bisect_left(self._firsts, first)]


def feeds_within(feeds: range, some: Collection[int]) -> list[int]:
    """Return the feeds of `some` that are in a range, by iterating over the shorter of the two."""
    return [feed for feed in some if feed in feeds] if len(some) < len(feeds) else [f for f in feeds if f in some]
