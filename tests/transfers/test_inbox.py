"""The inbox: feeds that arrive, fail and are awaited."""

from __future__ import annotations

import pytest

from atoll.errors import Code, Status, StatusError
from atoll.protocol.number_ranges import HOST_FEEDS
from atoll.transfers.inbox import Inbox, InboxStatistics


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
    inbox, called = Inbox(lambda session, feed: None), []
    first = HOST_FEEDS.start
    executor, dispatcher = (lambda: called.append("executor")), (lambda: called.append("dispatcher"))
    assert not inbox.await_all(5, [first], executor, waiter=1)
    assert not inbox.await_all(5, [first + 1], dispatcher, waiter=2)
    assert not inbox.await_all(5, [first + 2], executor, waiter=3)
    assert not inbox.await_all(5, [first + 3], executor, waiter=4)
    inbox.fail(5, first, 3, Status(Code.CANCELLED, "its launch has failed"))
    assert sorted(called) == ["dispatcher", "executor"]
    inbox.put(5, first + 3, b"bytes")
    assert called[2:] == ["executor"]


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


def test_the_end_of_a_channel_withdraws_no_transfer_that_has_replaced_its_own():
    """A peer that dials again may announce a feed before the old channel has ended."""
    inbox, granted = Inbox(lambda session, feed: None, max_bytes=10), []
    first, feed = HOST_FEEDS.start, HOST_FEEDS.start + 1
    inbox.put(5, first, b"ten bytes!")
    old, new = object(), object()
    for piece in (old, new):
        inbox.admit(5, feed, 10, 0, lambda piece=piece: granted.append(piece), piece=piece)
    inbox.withdraw(5, feed, old)
    assert inbox.statistics().waiting == 1
    inbox.drop(5, first)
    assert granted == [new]
    inbox.withdraw(5, feed, old)
    assert inbox.nbytes == 10
    inbox.withdraw(5, feed, new)
    assert inbox.nbytes == 0


def test_transfers_beyond_the_bound_land_while_there_is_memory_for_all_that_may_land():
    inbox = Inbox(lambda session, feed: None, max_bytes=10, has_memory=lambda nbytes: nbytes <= 30)
    granted, refused = list[int](), dict[int, Status]()

    def admit(session: int, feed: int) -> None:
        inbox.admit(session, feed, 10, 1, lambda: granted.append(feed), refuse=lambda why: refused.update({feed: why}))

    for feed in (1, 2, 3, 4):
        admit(5, feed)
    assert (granted, list(refused)) == ([1, 2, 3], [4])
    assert refused[4].code == Code.RESOURCE_EXHAUSTED
    admit(6, 10)
    admit(6, 11)
    assert (granted[3:], list(refused)) == ([10], [4, 11]), "sessions share the memory, and each has its bound"
    inbox.put(5, 1, b"ten bytes!")
    inbox.put(5, 2, b"ten bytes!")  # the machine counts them now
    admit(5, 5)
    assert granted[4:] == [5]
    assert inbox.nbytes == 50


def test_a_flood_of_transfers_that_are_refused_does_not_check_the_memory_each_time():
    checks, seconds = list[int](), [5.0]
    inbox = Inbox(
        lambda session, feed: None, 10, has_memory=lambda nbytes: bool(checks.append(nbytes)), now=lambda: seconds[0]
    )
    refused = list[Status]()
    inbox.admit(5, 1, 10, 1, lambda: None, refuse=refused.append)
    for feed in range(2, 100):
        inbox.admit(5, feed, 20, 1, lambda: None, refuse=refused.append)
    assert (len(refused), checks) == (98, [30])
    seconds[0] += 1
    inbox.admit(5, 100, 20, 1, lambda: None, refuse=refused.append)
    assert (len(refused), checks) == (99, [30, 30])


def test_a_transfer_larger_than_the_bound_needs_free_memory_also_if_nothing_else_is_held():
    memory = 100
    inbox = Inbox(lambda session, feed: None, max_bytes=10, has_memory=lambda nbytes: nbytes <= memory)
    granted, refused = list[int](), list[int]()
    for feed, nbytes in ((1, 101), (2, 100)):
        inbox.admit(
            5, feed, nbytes, 0, lambda feed=feed: granted.append(feed), refuse=lambda _, feed=feed: refused.append(feed)
        )
    assert (granted, refused, inbox.nbytes) == ([2], [1], 100)
