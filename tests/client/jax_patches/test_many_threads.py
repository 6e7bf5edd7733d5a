"""Tests that only reads by many threads lengthen the interpreter's switch interval."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from atoll.client.jax_patches.many_threads import PATCH, SwitchInterval

USUAL = 0.005


@pytest.fixture
def interval() -> Iterator[SwitchInterval]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL)
    yield SwitchInterval()
    sys.setswitchinterval(before)


def test_the_interval_follows_the_number_of_threads(interval: SwitchInterval) -> None:
    for threads, expected in ((1, USUAL), (50, USUAL), (200, 0.02), (1000, 0.1), (700, 0.1), (400, 0.04), (3, USUAL)):
        interval.adapt(threads)
        assert sys.getswitchinterval() == pytest.approx(expected)


def test_an_interval_of_the_user_stays(interval: SwitchInterval) -> None:
    sys.setswitchinterval(0.001)
    interval.adapt(1000)
    assert sys.getswitchinterval() == pytest.approx(0.001)
    sys.setswitchinterval(USUAL)
    interval.adapt(1000)
    sys.setswitchinterval(0.3)
    interval.adapt(1)
    assert sys.getswitchinterval() == pytest.approx(0.3)


class StandIn:
    """An array, whose value this process may have."""

    def __init__(self, value: int | None = None) -> None:
        self._npy_value = value


def test_a_read_sees_the_threads_of_the_process(interval: SwitchInterval) -> None:
    (replacement,) = PATCH.changes
    read = replacement.wrap(lambda array: 2)
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait) for _ in range(300)]
    for each in threads:
        each.start()
    try:
        assert read(StandIn(value=1)) == 2
        assert sys.getswitchinterval() == pytest.approx(USUAL), "a value that is here needs no wait"
        assert read(StandIn()) == 2
        assert sys.getswitchinterval() >= 0.03
    finally:
        ends.set()
        for each in threads:
            each.join()
    assert read(StandIn()) == 2
    assert sys.getswitchinterval() == pytest.approx(USUAL)
