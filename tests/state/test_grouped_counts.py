"""Groups of keys that share a count."""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass, replace

from atoll.state.grouped_counts import GroupedCounts


@dataclass
class Count:
    number: int = 0


def groups() -> GroupedCounts[int, Count]:
    return GroupedCounts(replace, astuple)


def test_keys_that_are_always_requested_together_share_a_group():
    counts = groups()
    (group,) = counts.of(range(512), Count)
    group.count.number += 1
    assert counts.of(range(512), Count) == [group]
    assert counts.get(511) == Count(1)


def test_keys_that_were_added_one_by_one_with_equal_counts_are_united():
    counts = groups()
    for key in range(100):
        counts.of((key,), Count)
    assert len(counts.of(range(100), Count)) == 1


def test_a_divided_group_stays_divided():
    """Otherwise, two programs that take turns would unite and divide it again and again."""
    counts = groups()
    counts.of(range(8), Count)
    counts.of(range(4), Count)
    version = counts.version
    for _ in range(3):
        assert len(counts.of(range(8), Count)) == 2
        assert len(counts.of(range(4), Count)) == 1
    assert counts.version == version


def test_each_key_has_its_own_sum_for_any_order_of_requests():
    rng = random.Random(3)
    for _ in range(50):
        counts, expected = groups(), dict.fromkeys(range(12), 0)
        for _ in range(40):
            keys = rng.sample(range(12), rng.randint(1, 12))
            by = rng.choice((-1, 0, 1))
            found = counts.of(keys, Count)
            assert sorted(key for group in found for key in group.keys) == sorted(keys)
            for group in found:
                group.count.number += by
            for key in keys:
                expected[key] += by
        known = dict(counts.items())
        assert {key: count.number for key, count in known.items()} == {key: expected[key] for key in known}
