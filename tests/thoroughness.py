"""How many examples tests of properties try: a part of them in the suite, which tries the same each time.

`make thorough` tries many more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

# By how many times more than in the suite.
TIMES = int(os.environ.get("ATOLL_TEST_THOROUGHNESS", "1"))
DEFAULT = 100


def examples(count: int = DEFAULT, part: int = 4) -> int:
    """Return how many of `count` examples to try: in the suite one of `part`, and otherwise all, `TIMES` times."""
    return count * TIMES if TIMES > 1 else count // part


def longer(test: Test) -> Test:
    """Have `make thorough` run a test that has more to do there, and is no test of properties."""
    return pytest.mark.thorough(test) if TIMES > 1 else test


def is_left_out(marks: Iterable[pytest.Mark], full: bool, times: int = TIMES) -> bool:
    """Return whether a run omits a test with these markers `thorough`.

    A run with the option `--full` omits only those that give a reason why a short run of them is of no use.
    """
    return times == 1 and any(not full or "only" in mark.kwargs for mark in marks)
