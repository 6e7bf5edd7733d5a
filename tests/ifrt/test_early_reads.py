"""Tests of the choice of arrays that are read before the proxy knows that they are ready."""

from __future__ import annotations

from atoll.ifrt.early_reads import MIN_SECONDS, MIN_SECONDS_BEFORE_OTHERS, EarlyReads


class Clock:
    seconds = 10.0

    def __call__(self) -> float:
        return self.seconds


def tries(reads: EarlyReads, count: int) -> int:
    """Return how many of so many reads of an old array are tried."""
    return sum(reads.may_try(0.0) for _ in range(count))


def test_only_arrays_that_were_launched_a_while_ago_are_tried() -> None:
    clock = Clock()
    reads = EarlyReads(clock)
    assert not reads.may_try(clock.seconds)
    assert not reads.may_try(clock.seconds - 0.9 * MIN_SECONDS)
    assert reads.may_try(clock.seconds - 1.1 * MIN_SECONDS)


def test_an_array_behind_which_others_were_launched_is_tried_later() -> None:
    """A serving loop reads the result of a step after it has launched the next one, and the step still runs."""
    clock = Clock()
    reads = EarlyReads(clock)
    reads.launched(clock.seconds - 0.005)
    reads.launched(clock.seconds - 0.002)
    assert not reads.may_try(clock.seconds - 0.005)
    assert reads.may_try(clock.seconds - 0.002)
    clock.seconds += MIN_SECONDS_BEFORE_OTHERS
    assert reads.may_try(clock.seconds - MIN_SECONDS_BEFORE_OTHERS - 0.005)


def test_each_further_miss_doubles_the_reads_that_are_not_tried() -> None:
    reads, skipped = EarlyReads(Clock()), []
    assert reads.may_try(0.0)
    for _ in range(8):
        reads.missed()
        skipped.append(next(number for number in range(1000) if reads.may_try(0.0)))
    assert skipped == [2, 4, 8, 16, 32, 64, 64, 64]


def test_a_hit_ends_the_effect_of_earlier_misses() -> None:
    reads = EarlyReads(Clock())
    assert tries(reads, 1) == 1
    reads.missed()
    assert tries(reads, 3) == 1
    reads.missed()
    assert tries(reads, 5) == 1, "four are not tried"
    assert tries(reads, 1) == 1, "the last one was a hit"
    reads.missed()
    assert tries(reads, 3) == 1, "two are not tried"
