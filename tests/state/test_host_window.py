"""The window of a host, which the controller and hosts of delegated runs share, and sums over gangs that have ended."""

from __future__ import annotations

from atoll.state.ended_gangs import EndedGangs
from atoll.state.host_window import BUSY_NS, NEW_NS, HostWindow

MS = 1_000_000


def window_with(*durations: int) -> HostWindow:
    window = HostWindow()
    for each in durations:
        window.start(1, each)
    return window


def test_a_host_is_busy_with_enough_work_that_is_divided_into_enough_gangs():
    assert not window_with(*[MS] * 7).is_busy()
    assert window_with(*[MS] * 8).is_busy()
    assert not window_with(BUSY_NS, 1).is_busy(), "one runs, one is enqueued, and the next is on its way"
    assert window_with(BUSY_NS, BUSY_NS).is_busy(), "long gangs end late enough to send the next one in time"
    assert not window_with(NEW_NS, NEW_NS).is_busy()
    assert window_with(NEW_NS, NEW_NS, NEW_NS).is_busy()
    assert window_with(*[MS] * 4).is_busy(max_ns=4 * MS)


def test_gangs_without_weight_count_by_their_duration_only():
    window = window_with(BUSY_NS)
    window.start(0, BUSY_NS)
    assert (window.in_flight, window.is_busy()) == (1, False)
    window.end(1, BUSY_NS)
    window.end(0, BUSY_NS)
    assert window == HostWindow()


def test_a_full_host_takes_gangs_again_when_half_of_its_window_is_free():
    window = window_with(*[100_000] * 24)
    for _ in range(12):
        assert not window.has_room_again(24, BUSY_NS)
        window.end(1, 100_000)
    assert window.has_room_again(24, BUSY_NS)
    assert window_with(BUSY_NS).has_room_again(24, BUSY_NS), "too few are in flight, whatever their duration"


def test_ended_gangs_are_reported_as_sums():
    gangs = EndedGangs(started=100, free=90)
    gangs.add(0, 200, 110, is_sampled=True)
    gangs.add(2, 5_000_200, 5_000_000, is_sampled=False)
    counted = gangs.counted()
    assert (counted.started, counted.free, counted.ended, counted.busy_ns) == (100, 90, 5_000_200, 5_000_110)
    assert (sum(counted.counts), counted.samples) == (2, ((0, 110),))
