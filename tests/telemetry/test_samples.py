"""The samples of a watched cluster are bounded, and merging them loses neither time nor a peak."""

from __future__ import annotations

import pytest

from atoll.telemetry.samples import Sample, Samples


def test_samples_stay_bounded_and_cover_all_of_the_time():
    samples = Samples(limit=8)
    for second in range(1000):
        samples.add(Sample(second, second + 1, busy=second % 2, waiting=7 if second == 3 else 0))
        assert len(samples) <= 8
    assert samples.seconds == 1000
    assert max(sample.waiting for sample in samples) == 7
    whole = sum(sample.busy * (sample.last - sample.first) for sample in samples)
    assert whole == pytest.approx(500)


def test_samples_on_both_sides_of_a_gap_are_not_merged():
    samples = Samples(limit=2)
    for first in (0.0, 1.0, 50.0):
        samples.add(Sample(first, first + 1))
    assert [(sample.first, sample.last) for sample in samples] == [(0.0, 2.0), (50.0, 51.0)]


def test_gaps_alone_do_not_lift_the_bound():
    samples = Samples(limit=2)
    for first in (0.0, 50.0, 100.0):
        samples.add(Sample(first, first + 1))
    assert [sample.first for sample in samples] == [50.0, 100.0]


def test_memory_that_is_unknown_has_no_fraction():
    assert (Sample(0, 1, used_bytes=5).memory, Sample(0, 1, used_bytes=5, memory_bytes=10).memory) == (0.0, 0.5)
