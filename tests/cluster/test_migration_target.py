"""Tests of parsing the devices to which a slice migrates."""

from __future__ import annotations

import pytest

from atoll.cluster.migration_target import read_migration_target


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("1", (1, ())),
        ("1:4,5", (1, (4, 5))),
        ("1:4-7", (1, (4, 5, 6, 7))),
        ("0:3,5-6", (0, (3, 5, 6))),
        (" 1:4, 5", (1, (4, 5))),
        ("0:2-4,0", (0, (2, 3, 4, 0))),
    ],
)
def test_a_target_is_an_island_and_maybe_its_devices(text: str, target: tuple[int, tuple[int, ...]]) -> None:
    assert read_migration_target(text) == target


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "-1", "1:", "1:a", "1:7-4", "1:3-", ":3", "1:0-99999999"),
        *("1:4,9-7", "1:0-" + "9" * 30, "1:4--5", "1:+4", "1:1_0", "9" * 5000, "\u0663"),
    ],
)
def test_an_invalid_target_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 1, 1:4,5 or 1:4-7"):
        read_migration_target(text)
