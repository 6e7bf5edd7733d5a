"""Tests of how hosts learn that a session's Python process has not started on another host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.host_services.python.failed_starts import ProgramStarts
from tests.host_services.python.stored_values import Store

SECONDS = 10.0


@pytest.fixture
def hosts() -> list[ProgramStarts]:
    store = Store()
    return [ProgramStarts(3, rank, lambda: store) for rank in range(3)]


class Looks:
    """Process that is ready at the third look."""

    def __init__(self) -> None:
        self._left = 3

    def __call__(self) -> bool:
        self._left -= 1
        return self._left >= 0


def test_a_failure_is_reported_to_the_hosts_that_wait_and_to_those_that_begin_later(hosts: list[ProgramStarts]) -> None:
    waits, fails, late = hosts
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(waits.begin().wait, lambda: True)
        fails.begin().failed("no space")
        assert waiting.result(SECONDS) == "no space"
    assert late.begin().wait(lambda: True) == "no space"


def test_a_failure_does_not_end_the_next_start(hosts: list[ProgramStarts]) -> None:
    for _ in range(3):
        starts = [each.begin() for each in hosts]
        starts[1].failed("no space")
        starts[2].failed("no memory")  # at the same time, before it learns of the other one
        assert starts[0].wait(lambda: True) == "no memory"
        assert [each.begin().wait(Looks()) for each in hosts] == ["", "", ""]


def test_a_failure_is_ignored_if_the_host_that_failed_has_started_again(hosts: list[ProgramStarts]) -> None:
    late, fails, _ = hosts
    fails.begin().failed("no space")
    assert fails.begin().wait(Looks()) == ""
    start = late.begin()
    assert start.wait(Looks()) == ""
    fails.begin().failed("no memory")
    assert start.wait(lambda: True) == "no memory"


def test_hosts_that_have_lost_one_another_learn_nothing() -> None:
    class Lost(Store):
        def set(self, key: str, value: str) -> None:
            raise OSError("lost")

    lost = ProgramStarts(3, 0, lambda: Lost())
    lost.begin().failed("no space")
    assert lost.begin().wait(Looks()) == ""
