"""Feeds of one session that will not arrive, or are for nobody if they do: ranges of numbers, each with the reason."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from atoll.errors import Status


class FailedFeeds:
    """The latest `most` ranges. Two of them share numbers only where one holds the other, which then goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ranges: dict[int, tuple[int, Status]] = {}  # by first number: the one past the last; in order of age
        self._firsts: list[int] = []  # sorted

    def add(self, first: int, count: int, status: Status) -> None:
        """So many numbers, from the first one on. What has failed keeps its reason."""
        stop = first + count
        holder = self._range_of(first)
        if count < 1 or (holder is not None and holder[0] >= stop):
            return
        for within in self._firsts[bisect_left(self._firsts, first) : bisect_left(self._firsts, stop)]:
            self._remove(within)
        self._ranges[first] = (stop, status)
        insort(self._firsts, first)
        if len(self._ranges) > self._most:
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
