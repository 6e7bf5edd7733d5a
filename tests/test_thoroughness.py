"""Tests of which tests a run leaves out."""

from __future__ import annotations

import pytest

from tests.thoroughness import is_left_out

LONG = pytest.mark.thorough.mark
LONG_ONLY = pytest.mark.thorough(only="what it waits for is random").mark


@pytest.mark.parametrize(
    ("marks", "suite", "full", "thorough"),
    [([], False, False, False), ([LONG], True, False, False), ([LONG_ONLY], True, True, False)],
)
def test_a_run_leaves_out_what_is_too_long_for_it(
    marks: list[pytest.Mark], suite: bool, full: bool, thorough: bool
) -> None:
    assert is_left_out(marks, full=False, times=1) is suite
    assert is_left_out(marks, full=True, times=1) is full
    assert is_left_out(marks, full=False, times=20) is thorough
