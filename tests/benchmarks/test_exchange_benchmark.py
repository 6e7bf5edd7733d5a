"""Tests of the benchmark that exchanges trees in several ways."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from benchmarks.exchange import balanced


@pytest.mark.parametrize("ways", [["Atoll", "device_put", "Ray"], ["A", "B", "C", "D"], ["A", "B", "C", "D", "E"]])
def test_each_way_has_each_place_and_follows_each_other_way_equally_often(ways: list[str]) -> None:
    rounds = [balanced(ways, number) for number in range(2 * len(ways))]
    assert all(sorted(each) == sorted(ways) for each in rounds)
    places = Counter(place for each in rounds for place in enumerate(each))
    assert set(places.values()) == {2}
    assert len(places) == len(ways) ** 2
    pairs = Counter(pair for each in rounds for pair in itertools.pairwise(each))
    assert set(pairs.values()) == {2}
    assert len(pairs) == len(ways) * (len(ways) - 1)
