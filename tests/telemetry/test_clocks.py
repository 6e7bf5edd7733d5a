"""Tests of reading remote clocks: the error stays within its bound, for all clocks and networks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.telemetry.clocks import DRIFT, MAX_SAMPLES, Alignment, Clock, offsets

S = 1_000_000_000


def measured(
    offset: float, drift: float, delays: list[tuple[float, float]], every: float = 1.0, begin: float = 100.0
) -> tuple[Clock, list[tuple[int, float]]]:
    """Return measurements of a clock that is ahead by `offset` and faster by `drift`, with its true readings."""
    clock, readings = Clock(), []
    for number, (there, back) in enumerate(delays):
        sent = begin + number * every
        read = sent + there
        shown = int((read + offset + drift * (read - begin)) * S)
        clock.measure(sent, shown, read + back)
        readings.append((shown, read))
    return clock, readings


DELAYS = st.lists(st.tuples(st.floats(1e-6, 0.5), st.floats(1e-6, 0.5)), min_size=1, max_size=80)


@given(st.floats(-1e6, 1e6), st.floats(-0.9 * DRIFT, 0.9 * DRIFT), DELAYS, st.floats(-20, 120))
def test_a_time_is_where_it_is_said_to_be_to_within_the_error(offset, drift, delays, after):
    clock, _ = measured(offset, drift, delays)
    truly = 100.0 + after
    shown = int((truly + offset + drift * after) * S)
    correction, error = clock.offset(shown)
    assert abs(shown + correction - truly * S) <= error + 1000  # what 64 bits of a float leave of such times


@given(st.floats(-1e6, 1e6), st.floats(-0.9 * DRIFT, 0.9 * DRIFT), DELAYS)
def test_so_is_a_time_that_was_aligned(offset, drift, delays):
    clock, readings = measured(offset, drift, delays)
    align = Alignment(clock)
    for shown, truly in readings:
        assert abs(align(shown) - truly * S) <= align.error + 1000


@given(st.floats(-1e6, 1e6), st.floats(-0.9 * DRIFT, 0.9 * DRIFT), DELAYS, st.floats(0.1, 100), st.floats(0, 1))
def test_a_table_of_offsets_is_right_to_within_its_error_in_between(offset, drift, delays, seconds, part):
    clock, _ = measured(offset, drift, delays)
    table, error = offsets(clock, seconds)
    last = clock.read
    at = int(last - part * seconds * S)
    (before, one), (after, other) = next(pair for pair in pairwise(table) if pair[0][0] <= at <= pair[1][0])
    correction = one + (other - one) * (at - before) // (after - before)
    truly = (at / S - offset + drift * 100.0) / (1 + drift)
    assert abs(at + correction - truly * S) <= error + 2000


@given(st.floats(-1e3, 1e3), DELAYS, st.lists(st.integers(50 * S, 200 * S), min_size=2, max_size=50))
def test_later_times_stay_later(offset, delays, times):
    align = Alignment(measured(offset, 0.0, delays)[0])
    aligned = [align(at) for at in sorted(times)]
    assert aligned == sorted(aligned)


def test_of_many_round_trips_the_error_is_half_of_the_shortest_at_most():
    clock, readings = measured(5.0, 0.0, [(0.02, 0.03), (0.0004, 0.0006), (0.1, 0.001)])
    _, error = clock.offset(readings[1][0])
    assert error <= S * 0.001 / 2 + 1


def test_round_trips_that_are_slow_one_way_each_make_the_error_smaller_than_half_of_any():
    clock, readings = measured(5.0, 0.0, [(0.001, 0.000001), (0.000001, 0.001)], every=1e-3)
    assert clock.offset(readings[0][0])[1] < S * 0.001 / 10


def test_the_error_grows_with_the_time_to_the_nearest_round_trip():
    clock, readings = measured(0.0, 0.0, [(0.001, 0.001)])
    _, at_once = clock.offset(readings[0][0])
    _, later = clock.offset(readings[0][0] + 10 * S)
    assert later - at_once == pytest.approx(10 * S * DRIFT, rel=1e-3)


def test_a_clock_that_nobody_measured_has_no_error_that_one_could_name():
    assert Clock().offset(7) == (0, -1)
    align = Alignment(Clock())
    assert (align(7), align.error) == (7, -1)


@pytest.mark.parametrize("sent", [math.nan, math.inf, -math.inf, 1e9, -1e9])
def test_an_answer_to_what_was_never_asked_says_nothing(sent):
    clock = Clock()
    clock.measure(sent, 5, 100.0)
    assert clock.samples == 0


def test_of_a_long_time_little_is_kept_and_most_of_it_is_recent():
    clock, readings = measured(3.0, 0.5 * DRIFT, [(0.001, 0.001)] * 4000)
    assert len(clock._kept) <= MAX_SAMPLES
    for (shown, truly), most in ((readings[-1], 3e6), (readings[len(readings) // 2], 200e6)):
        correction, error = clock.offset(shown)
        assert abs(shown + correction - truly * S) <= error + 1000
        assert error < most


def test_a_reading_that_cannot_be_of_the_same_clock_is_not_taken_for_it():
    clock, readings = measured(5.0, 0.0, [(0.0001, 0.0001)] * 20)
    before = clock.offset(readings[-1][0])
    assert clock.measure(120.5, 85 * S, 120.501) is False, "it was stopped for 40 seconds"
    assert (clock.samples, clock.offset(readings[-1][0])) == (20, before)
    assert clock.measure(120.5, int(125.5005 * S), 120.501) is True
