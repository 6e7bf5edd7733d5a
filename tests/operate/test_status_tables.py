"""Numbers as a person reads them."""

import pytest

from atoll.operate.status_tables import ranges
from atoll.quantities import human_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 70, "1048576.0 PiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([0, 1, 4, 6, 7], "0-1, 4, 6-7"), ([2, 0, 1], "0-2")],
)
def test_runs_of_numbers_are_drawn_together(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
