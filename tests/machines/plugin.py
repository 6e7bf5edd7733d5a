"""Fixtures for tests on several machines, which a test module gets by importing them.

Without permission for namespaces, such tests are skipped, with the reason.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

import pytest

from tests.machines.bed import Machines, why_not

__all__ = ["long", "machines", "make_machines"]

# The suite contains a short form of these tests.
long = pytest.mark.skipif(
    not os.environ.get("ATOLL_TEST_MACHINES"), reason="these take minutes: run them by `make machines`"
)

_why_not = functools.cache(why_not)


@pytest.fixture
def make_machines() -> Iterator[Callable[..., Machines]]:
    """Return `make_machines(count)`, which creates machines that end with the test."""
    reason = _why_not()
    if reason:
        pytest.skip(reason)
    beds: list[Machines] = []

    def make(count: int = 3) -> Machines:
        beds.append(Machines(count))
        return beds[-1]

    yield make
    for bed in beds:
        bed.close()


@pytest.fixture
def machines(make_machines: Callable[..., Machines]) -> Machines:
    """Return three machines: m0, m1 and m2."""
    return make_machines(3)
