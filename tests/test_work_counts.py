"""Tests that instructions are counted in all versions of Python."""

from __future__ import annotations

import threading

from tests.work_counts import instructions_of


def doubled(value: int) -> int:
    return value * 2


def add_up(count: int) -> int:
    return sum(doubled(each) for each in range(count))


def test_each_call_counts_the_same_and_no_instruction_is_missed():
    first, second = (instructions_of(lambda: add_up(10)) for _ in range(2))
    assert first == second, "also if the code has run before"
    per_step = (instructions_of(lambda: add_up(1010)) - first) / 1000
    assert per_step == int(per_step)
    assert per_step >= 8, "of the generator and of the function"


def test_work_of_other_threads_does_not_count():
    def add_up_elsewhere() -> None:
        thread = threading.Thread(target=add_up, args=(10_000,))
        thread.start()
        thread.join()

    assert instructions_of(add_up_elsewhere) < 10_000
