"""Tests of the benchmark that exchanges trees in several ways."""

from __future__ import annotations

from benchmarks.exchange import rotated


def test_each_way_is_first_in_one_of_so_many_rounds() -> None:
    ways = ["Atoll", "device_put", "Ray"]
    rounds = [rotated(ways, number) for number in range(6)]
    assert rounds[0] == ways
    assert [each[0] for each in rounds] == ways * 2
    assert all(sorted(each) == sorted(ways) for each in rounds)
