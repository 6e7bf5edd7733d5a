"""Tests of the ranges of numbers that several processes choose."""

from __future__ import annotations

from itertools import pairwise

import pytest

from atoll.protocol import number_ranges


@pytest.mark.parametrize("suffix", ["HANDLES", "FEEDS", "DEVICES"])
def test_ranges_of_one_kind_are_disjoint_and_fit_signed_numbers_of_64_bits(suffix: str):
    ranges = sorted(
        (each for name, each in vars(number_ranges).items() if name.endswith(suffix)), key=lambda each: each.start
    )
    assert len(ranges) > 1
    assert all(before.stop <= after.start for before, after in pairwise(ranges))
    assert ranges[-1].stop <= 1 << 63


def test_every_range_is_of_a_kind():
    names = [name for name, each in vars(number_ranges).items() if isinstance(each, range)]
    assert all(name.endswith(("HANDLES", "FEEDS", "DEVICES")) for name in names)
