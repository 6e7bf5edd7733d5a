"""The inbox: feeds that arrive, fail and are awaited."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import Code, Status, StatusError
from atoll.protocol.number_ranges import HOST_FEEDS
from atoll.transfers.inbox import MOST_EXAMINED, FailedFeeds, Inbox, InboxStatistics, ReceiveWindow


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
    for feed in range(1, 100):
        inbox.admit(5, feed, 20, 1, lambda: None, refuse=refused.append)
    assert (len(refused), checks) == (98, [40])
    seconds[0] += 1
    inbox.admit(5, 100, 20, 1, lambda: None, refuse=refused.append)
    assert (len(refused), checks) == (99, [40, 40])


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


# ---- which transfers may land


def nothing() -> None:
    pass


def test_an_announcement_costs_the_same_however_many_transfers_wait():
    """All sessions share the lock of the inbox, and a client can announce transfers with few bytes."""
    window, examined = ReceiveWindow(10), list[int]()
    for feed in range(1, 1000):
        window.request(feed, 10, feed, nothing)
        window.admitted((feed,), lambda each: bool(examined.append(each)))
    assert window.waiting == 998
    assert len(examined) <= 999


def test_free_memory_goes_to_one_of_the_first_transfers_that_wait():
    window, landed = ReceiveWindow(10), list[int]()
    first = range(3, 3 + MOST_EXAMINED)
    for feed, nbytes in [(1, 4), (2, 2), *((feed, 9) for feed in first), (1000, 5)]:
        window.request(feed, nbytes, 0, lambda feed=feed: landed.append(feed))
        window.admitted((feed,))
    window.withdraw(2)
    assert window.admitted() == [], "a transfer that fits waits behind the others"
    window.withdraw(1)
    for grant in window.admitted():
        grant()
    assert landed == [3]


STEPS = st.one_of(
    st.tuples(st.just("request"), st.integers(1, 9), st.integers(0, 12), st.integers(0, 4)),
    st.tuples(st.just("land"), st.integers(1, 9), st.integers(0, 12), st.booleans()),
    st.tuples(st.just("take"), st.integers(1, 9)),
    st.tuples(st.just("withdraw"), st.integers(1, 9)),
    st.tuples(st.just("await"), st.integers(1, 9)),
)


@given(st.lists(STEPS, max_size=40))
def test_no_transfer_waits_that_may_land(steps: list[Any]) -> None:
    """It may land if it fits, if a blocked plan awaits it, or if it belongs to the oldest launch."""
    bound, awaited = 10, set[int]()
    window = ReceiveWindow(bound)
    waiting: dict[int, tuple[int, int]] = {}
    landing: dict[int, tuple[int, int]] = {}
    here: dict[int, tuple[int, int]] = {}
    granted: list[int] = []
    for step, feed, *more in steps:
        if step == "request":
            waiting[feed] = (more[0], more[1])
            window.request(feed, more[0], more[1], lambda feed=feed: granted.append(feed))
        elif step == "land":
            window.taken(feed)
            here[feed] = (more[0], landing.pop(feed, (0, 0))[1])
            window.landed(feed, more[0])
        elif step == "take":
            here.pop(feed, None)
            window.taken(feed)
        elif step == "withdraw":
            waiting.pop(feed, None)
            landing.pop(feed, None)
            window.withdraw(feed)
        else:
            awaited.add(feed)
        for grant in window.admitted((feed,), awaited.__contains__):
            grant()
        for each in granted:
            landing[each] = waiting.pop(each)
        granted.clear()
        held = sum(nbytes for some in (landing, here) for nbytes, _ in some.values())
        launches = [launch for some in (waiting, landing, here) for _, launch in some.values() if launch]
        assert (window.held, window.waiting) == (held, len(waiting))
        assert window.is_empty is not (waiting.keys() | landing.keys() | here.keys() > set())
        for each, (nbytes, launch) in waiting.items():
            assert held
            assert held + nbytes > bound
            assert each not in awaited
            assert not launch or launch != min(launches)
