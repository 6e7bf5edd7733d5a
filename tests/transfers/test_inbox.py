"""The inbox: feeds that arrive, fail and are awaited."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import Code, Status, StatusError
from atoll.protocol.number_ranges import HOST_FEEDS
from atoll.transfers.inbox import FailedFeeds, Inbox, InboxStatistics


def test_what_comes_for_a_session_that_is_over_is_not_kept():
    inbox, released = Inbox(lambda session, feed: None), []
    inbox.put(5, HOST_FEEDS.start, b"before", lambda: released.append("before"))
    inbox.drop_session(5)
    inbox.put(5, HOST_FEEDS.start + 1, b"after", lambda: released.append("after"))
    inbox.fail(5, HOST_FEEDS.start + 2, 1, Status(Code.CANCELLED, "over"))
    assert released == ["before", "after"]
    assert inbox.statistics() == InboxStatistics(0, 0, 0)


def test_everyone_whose_wait_ends_with_a_range_of_failed_feeds_is_told_once():
    """Bytes of a delegated run are awaited by its dispatcher, and by the executor for segments that have begun."""
    inbox, told = Inbox(lambda session, feed: None), []
    first = HOST_FEEDS.start
    executor, dispatcher = (lambda: told.append("executor")), (lambda: told.append("dispatcher"))
    assert not inbox.await_all(5, [first], executor, waiter=1)
    assert not inbox.await_all(5, [first + 1], dispatcher, waiter=2)
    assert not inbox.await_all(5, [first + 2], executor, waiter=3)
    assert not inbox.await_all(5, [first + 3], executor, waiter=4)
    inbox.fail(5, first, 3, Status(Code.CANCELLED, "its launch has failed"))
    assert sorted(told) == ["dispatcher", "executor"]
    inbox.put(5, first + 3, b"bytes")
    assert told[2:] == ["executor"]


def test_failed_feeds_are_remembered_up_to_a_bound_and_the_latest_of_them():
    inbox = Inbox(lambda session, feed: None, max_failed_feeds=3)
    feeds = [HOST_FEEDS.start + i for i in range(10)]
    for feed in feeds:
        inbox.fail(5, feed, 1, Status(Code.CANCELLED, "its launch has failed"))
    for feed in feeds[-3:]:
        with pytest.raises(StatusError, match="its launch has failed"):
            inbox.take(5, feed)
    for feed in feeds[:-3]:
        inbox.put(5, feed, b"late")
        assert inbox.take(5, feed)[0] == b"late"


def test_feeds_that_are_taken_together_are_all_there_or_none_of_them_stays():
    inbox, released = Inbox(lambda session, feed: None), []
    for feed in (1, 2, 4):
        inbox.put(5, feed, b"bytes", lambda feed=feed: released.append(feed))
    assert list(inbox.take_all(5, [1, 2, 1])) == [1, 2]
    assert released == []
    inbox.put(5, 2, b"bytes", lambda: released.append("again"))
    inbox.put_failed(5, 3, Status(Code.DATA_LOSS, "it was cut off"))
    with pytest.raises(StatusError, match="it was cut off"):
        inbox.take_all(5, [2, 3, 4])
    assert (released, inbox.nbytes) == (["again", 4], 0)


# ---- ranges of failed feeds


def why(text: str) -> Status:
    return Status(Code.CANCELLED, text)


def test_a_range_that_holds_others_takes_their_place():
    failed = FailedFeeds(10)
    failed.add(5, 1, why("one"))
    failed.add(0, 10, why("all"))
    failed.add(7, 1, why("again"))
    assert [failed.get(feed) for feed in (0, 5, 7, 9, 10)] == [why("all")] * 4 + [None]
    assert len(failed) == 1


def test_the_oldest_ranges_are_forgotten_beyond_the_bound():
    failed = FailedFeeds(2)
    for first in (20, 0, 10):
        failed.add(first, 5, why(str(first)))
    assert [feed in failed for feed in (24, 4, 14)] == [False, True, True]


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=30))
def test_a_feed_has_failed_when_a_range_with_it_has(ranges):
    failed, expected = FailedFeeds(1000), set()
    for number, whole in ranges:
        first, count = (number // 4 * 4, 4) if whole else (number, 1)
        failed.add(first, count, why("gone"))
        expected |= set(range(first, first + count))
    assert {feed for feed in range(-1, 9) if feed in failed} == expected
