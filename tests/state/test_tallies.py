"""How many gangs there were, how long they waited, and how long they took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.ir.plan import STEP_KINDS
from atoll.state.tallies import BOUNDS, TRANSFERS, Histogram, Tallies, counts_of


@given(st.lists(st.floats(0, 200), max_size=30))
def test_a_histogram_counts_each_time_below_its_bound(times: list[float]):
    histogram = Histogram()
    for each in times:
        histogram.observe(each)
    for number, bound in enumerate(BOUNDS):
        assert sum(histogram.counts[: number + 1]) == sum(each <= bound for each in times)
    assert sum(histogram.counts) == len(times)
    assert abs(histogram.total - sum(times)) < 1e-6


@given(st.lists(st.integers(0, 200_000_000_000), max_size=30))
def test_many_are_counted_together_as_each_of_them(times: list[int]):
    apart, together = Histogram(), Histogram()
    for each in times:
        apart.observe(each * 1e-9)
    together.observe_all(counts_of(times), sum(times) * 1e-9)
    assert together.counts == apart.counts
    assert abs(together.total - apart.total) < 1e-6


def test_bounds_rise():
    assert list(BOUNDS) == sorted(set(BOUNDS))


def test_what_has_started_and_not_ended_runs():
    tallies = Tallies()
    tally = tallies[0, "a"]
    for _ in range(3):
        tally.waited.observe(0.1)
    tally.ran.observe(1.0)
    tally.failed += 1
    assert tally.running == 1
    assert tallies[0, "a"] is tally
    assert list(tallies) == [(0, "a")]


def test_transfers_are_kinds_that_plans_have():
    assert set(STEP_KINDS.values()) >= TRANSFERS
