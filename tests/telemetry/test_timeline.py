"""Tests of the timeline of devices, made from spans in order of arrival."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.spans import Span
from atoll.telemetry.timeline import Bar, Stripe, TimeLine, stripes

MS = 1_000_000


def span(sequence: int, started: int, ended: int, *devices: int, host: int = 0, session: int = 1) -> Span:
    return Span(0, host, session, "f", "call", sequence, started * MS, ended * MS, 1, devices or (0,))


def bars(line: TimeLine, host: int = 0, ordinal: int = 0) -> list[tuple[float, float]]:
    (row,) = [row for row in line.rows() if (row.host, row.ordinal) == (host, ordinal)]
    return [(round(bar.started, 6), round(bar.ended, 6)) for bar in row.bars]


def test_a_span_ends_when_it_is_heard_of_and_begins_when_its_device_was_free():
    line = TimeLine()
    line.add([span(1, 0, 10), span(2, 0, 30, session=2)], now=100.0)
    assert bars(line) == [(99.97, 99.98), (99.98, 100.0)]


def test_what_comes_later_follows_on_what_came_before():
    line = TimeLine()
    line.add([span(1, 0, 10)], now=100.0)
    line.add([span(2, 5, 30, session=2)], now=100.02)
    assert bars(line) == [(99.99, 100.0), (100.0, 100.02)]


def test_hosts_are_on_one_time_line():
    line = TimeLine()
    line.add([span(1, 0, 10), span(2, 10, 20, host=1)], now=50.0)
    assert (bars(line), bars(line, host=1)) == ([(49.98, 49.99)], [(49.99, 50.0)])


def test_a_report_that_was_late_moves_nothing():
    line = TimeLine()
    line.add([span(1, 0, 10)], now=100.0)
    line.add([span(2, 10, 20, session=2)], now=100.5)
    assert bars(line)[-1] == (100.0, 100.01)


def test_another_controller_is_aligned_anew():
    line = TimeLine()
    line.add([span(1, 80_000, 80_010)], now=100.0)
    line.add([span(2, 0, 10)], now=101.0)
    assert bars(line) == [(99.99, 100.0), (100.99, 101.0)]


def test_what_one_session_does_without_a_pause_is_one_bar():
    line = TimeLine()
    line.add([span(1, 0, 10), span(2, 0, 20), span(3, 50, 60)], now=100.0)
    assert bars(line) == [(99.94, 99.96), (99.99, 100.0)]


def test_what_is_older_than_the_window_is_forgotten():
    line = TimeLine(window=10.0)
    line.add([span(1, 0, 10)], now=100.0)
    line.trim(110.5)
    assert bars(line) == []


def test_a_device_is_busy_for_the_part_of_the_time_that_something_ran():
    line = TimeLine()
    line.add([span(1, 0, 1000), span(2, 3000, 4000)], now=100.0)
    assert line.busy(0, 0, now=100.0, seconds=4.0) == 0.5
    assert line.busy(7, 0, now=100.0, seconds=4.0) == 0.0


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 1), st.sets(st.integers(0, 3))), max_size=30
    ),
    st.integers(1, 5),
)
def test_bars_of_a_device_never_overlap(drawn: list[tuple[int, int, int, set[int]]], parts: int):
    spans = [
        span(number, min(a, b), max(a, b), *devices, host=host) for number, (a, b, host, devices) in enumerate(drawn)
    ]
    line = TimeLine()
    for part in range(parts):
        line.add(spans[part::parts], now=100.0 + part)
    for row in line.rows():
        assert all(bar.started < bar.ended for bar in row.bars)
        assert all(before.ended <= after.started + 1e-9 for before, after in pairwise(row.bars))


def test_a_pixel_shows_who_had_most_of_it():
    found = stripes([Bar(0.0, 0.3, 1), Bar(0.3, 1.0, 2)], 0.0, 4.0, 4)
    assert found == [Stripe(0, 1, 2)]


def test_neighbours_of_one_session_are_one_stripe_and_gaps_are_seen():
    some = [Bar(0.0, 1.0, 1), Bar(1.0, 2.0, 1), Bar(3.0, 4.0, 1)]
    assert stripes(some, 0.0, 4.0, 4) == [Stripe(0, 2, 1), Stripe(3, 4, 1)]


def test_a_pixel_with_little_in_it_is_empty():
    assert stripes([Bar(0.0, 0.2, 1)], 0.0, 4.0, 4) == []


@given(st.lists(st.tuples(st.floats(-5, 15), st.floats(0, 3), st.integers(1, 4)), max_size=40), st.integers(1, 50))
def test_stripes_are_in_order_and_within_the_picture(drawn: list[tuple[float, float, int]], pixels: int):
    found = stripes([Bar(start, start + seconds, who) for start, seconds, who in drawn], 0.0, 10.0, pixels)
    edges = [edge for stripe in found for edge in (stripe.first, stripe.last)]
    assert edges == sorted(edges)
    assert all(0 <= stripe.first < stripe.last <= pixels for stripe in found)
