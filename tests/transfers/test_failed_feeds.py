"""Failed feeds: ranges that contain one another, and their bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import Code, Status
from atoll.transfers.failed_feeds import FailedFeeds


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
