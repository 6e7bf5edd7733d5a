import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.statistics import Summary, quartiles, rate_in_common_window, ratio, summarize

positive = st.floats(min_value=1e-3, max_value=1e6)


def test_quartiles_are_samples_when_the_samples_divide_evenly():
    assert quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)


def test_quartiles_interpolate_between_samples():
    assert quartiles([1, 2, 3, 4]) == (1.75, 2.5, 3.25)


def test_one_sample_has_no_spread():
    assert summarize([7.0]) == Summary(median=7.0, low=7.0, high=7.0, count=1)


def test_one_disturbed_round_does_not_move_the_median():
    assert summarize([10, 10, 10, 10, 1000]).median == 10


@given(st.lists(positive, min_size=1, max_size=20), st.randoms())
def test_the_order_of_rounds_does_not_matter_to_a_summary(samples: list[float], order: random.Random):
    shuffled = list(samples)
    order.shuffle(shuffled)
    assert summarize(shuffled) == summarize(samples)


@given(st.lists(positive, min_size=1, max_size=20))
def test_quartiles_lie_in_order_within_the_samples(samples: list[float]):
    low, median, high = quartiles(samples)
    slack = 1e-9 * max(samples)
    assert min(samples) - slack <= low <= median + slack
    assert median <= high + slack <= max(samples) + 2 * slack


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_nothing_is_made_of_missing_or_infinite_samples(samples: list[float]):
    with pytest.raises(ValueError, match="samples"):
        summarize(samples)


def test_a_ratio_is_that_of_the_medians():
    assert ratio([1, 2, 3], [4, 4, 4]).of_medians == 0.5


def test_what_slows_both_sides_of_a_round_does_not_widen_a_ratio():
    measured = ratio([5, 10, 50], [10, 20, 100])
    assert (measured.low, measured.of_medians, measured.high) == (0.5, 0.5, 0.5)


@given(st.lists(positive, min_size=1, max_size=20))
def test_anything_against_itself_is_one(samples: list[float]):
    measured = ratio(samples, samples)
    assert (measured.low, measured.of_medians, measured.high) == (1, 1, 1)


def test_clients_count_while_all_of_them_are_at_work():
    early = [(0.0, 0.0), (4.0, 40.0)]  # ten per second
    late = [(2.0, 0.0), (3.0, 30.0), (9.0, 30.0)]  # thirty in the first second, and none later
    assert rate_in_common_window([early, late]) == (20 + 30) / 2
    assert rate_in_common_window([early]) == 10


def test_between_two_points_of_its_progress_a_client_ends_as_many_in_equal_times():
    assert rate_in_common_window([[(0.0, 0.0), (10.0, 100.0)], [(4.0, 0.0), (5.0, 0.0), (6.0, 8.0)]]) == 10 + 4


def test_clients_that_never_were_at_work_together_have_no_rate():
    with pytest.raises(ValueError, match="before the last one started"):
        rate_in_common_window([[(0.0, 0.0), (1.0, 9.0)], [(1.5, 0.0), (2.0, 9.0)]])


def test_rounds_without_a_partner_are_refused():
    with pytest.raises(ValueError, match="2 rounds of ours against 1 of theirs"):
        ratio([1, 2], [1])


def test_a_side_that_measured_nothing_is_refused():
    with pytest.raises(ValueError, match="cannot be divided by"):
        ratio([1.0], [0.0])
