"""Counts of gangs, and histograms of their waiting times and durations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.ir.plan import STEP_KINDS
from atoll.state.tallies import BOUNDS, TRANSFERS, Histogram, Tallies, Tally, counts_of


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
def test_counting_values_together_equals_counting_each(times: list[int]):
    apart, together = Histogram(), Histogram()
    for each in times:
        apart.observe(each * 1e-9)
    together.observe_all(counts_of(times), sum(times) * 1e-9)
    assert together.counts == apart.counts
    assert abs(together.total - apart.total) < 1e-6


def test_bounds_are_strictly_ascending():
    assert list(BOUNDS) == sorted(set(BOUNDS))


def test_gangs_that_have_started_and_not_ended_are_running():
    tallies = Tallies()
    tally = tallies[0, "a"]
    for _ in range(3):
        tally.waited.observe(0.1)
    tally.ran.observe(1.0)
    tally.failed += 1
    assert tally.running == 1
    assert tallies[0, "a"] is tally
    assert list(tallies) == [(0, "a")]


def test_joint_gangs_count_on_each_island_and_other_tallies_are_not_copied():
    tallies, joint = Tallies(), Tally()
    for key in [(0, "a"), (0, "b")]:
        tallies[key].waited.observe(0.1)
        tallies[key].ended(1000, 1000, is_well=True)
        tallies[key].move("put", 8)
    joint.waited.observe(0.1, 3)
    joint.ended(500, 2000, is_well=True)
    joint.ended(0, 0, is_well=False)
    found = tallies.with_joint({((0, 1), "a"): joint, ((1, 2), "a"): joint})
    counts = {key: (each.started, each.running, each.failed, each.device_ns) for key, each in found.items()}
    part = (3, 1, 1, 1000)
    both = (6, 2, 2, 2000)
    assert counts == {(0, "a"): (4, 1, 1, 2000), (0, "b"): (1, 0, 0, 1000), (1, "a"): both, (2, "a"): part}
    assert found[0, "a"].moved == {"put": [1, 8]}
    assert found[0, "b"] is tallies[0, "b"]
    assert (tallies[0, "a"].started, tallies[0, "a"].device_ns, len(tallies)) == (1, 1000, 2)


def test_islands_of_joint_gangs_count_every_nanosecond_and_byte_together():
    joint = Tally()
    joint.waited.observe(0.1)
    joint.ended(500, 11, is_well=True)
    joint.move("reshard", 8)
    found = Tallies().with_joint({((0, 1, 2), "a"): joint})
    assert [each.device_ns for each in found.values()] == [4, 4, 3]
    assert [each.moved["reshard"][1] for each in found.values()] == [3, 3, 2]


def test_transfers_are_step_kinds_of_plans():
    assert set(STEP_KINDS.values()) >= TRANSFERS
