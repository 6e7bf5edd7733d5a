"""Tests of the order and the bounds of compilations for the islands that remain after a loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import pytest

from atoll.elastic.compile_ahead import CompilationAhead
from atoll.errors import Details, Kind
from tests.cluster_process import eventually

Islands = tuple[int, ...]


class Trainings:
    """Makes trainings, whose compilations take five seconds of the fake clock, and runs the threads one by one."""

    def __init__(
        self,
        limit: int = 8,
        fewest_islands: int = 1,
        refused: Islands = (),
        error: Exception | None = None,
    ) -> None:
        self.seconds = 0.0
        self.compiled: list[Islands] = []
        self.threads: list[Callable[[], None]] = []
        self.refused, self.error = refused, error
        self.ahead = CompilationAhead(limit, fewest_islands, lambda name, work: self.threads.append(work), self.clock)

    def clock(self) -> float:
        return self.seconds

    def make(self, islands: Islands) -> Any:
        trainings = self

        class Training:
            def compile_ahead(self, kept: Any, batch: Any) -> None:
                trainings.seconds += 5
                trainings.compiled.append(islands)
                if islands == trainings.refused:
                    assert trainings.error is not None
                    raise trainings.error

        return Training()

    def advance(self, *islands: int) -> None:
        self.ahead.advance(islands, self.make, [], None)

    def run(self, *islands: int) -> None:
        """Advance until no compilation begins any more."""
        for _ in range(20):
            self.advance(*islands)
            while self.threads:
                self.threads.pop()()
            self.seconds += 5


def test_each_set_without_one_island_is_compiled_once() -> None:
    trainings = Trainings()
    trainings.run(0, 1, 2)
    assert trainings.compiled == [(1, 2), (0, 2), (0, 1)]
    assert trainings.ahead.compiled == [(0, 1), (0, 2), (1, 2)]


def test_one_set_is_compiled_at_a_time_and_then_follows_a_pause_as_long() -> None:
    trainings = Trainings()
    trainings.advance(0, 1, 2)
    trainings.advance(0, 1, 2)
    assert len(trainings.threads) == 1
    trainings.threads.pop()()
    trainings.seconds += 4.9
    trainings.advance(0, 1, 2)
    assert trainings.threads == []
    trainings.seconds += 0.1
    trainings.advance(0, 1, 2)
    assert len(trainings.threads) == 1


@pytest.mark.parametrize(("limit", "fewest_islands", "count"), [(0, 1, 0), (2, 1, 2), (8, 2, 3), (8, 3, 0)])
def test_no_more_sets_are_compiled_than_the_run_wants(limit: int, fewest_islands: int, count: int) -> None:
    trainings = Trainings(limit, fewest_islands)
    trainings.run(0, 1, 2)
    assert len(trainings.compiled) == count


def test_nothing_is_compiled_for_the_loss_of_the_only_island() -> None:
    trainings = Trainings()
    trainings.run(0)
    assert trainings.compiled == []


@pytest.mark.parametrize("kind", [ValueError, AssertionError, ZeroDivisionError])
def test_a_set_that_does_not_compile_is_reported_and_the_others_are_compiled(
    caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    """The user's functions, which the compilation traces, may raise any error."""
    trainings = Trainings(refused=(0, 2), error=kind("a batch of 3 rows cannot be divided"))
    with caplog.at_level(logging.WARNING):
        trainings.run(0, 1, 2)
    assert trainings.compiled == [(1, 2), (0, 2), (0, 1)]
    assert trainings.ahead.compiled == [(0, 1), (1, 2)]
    assert [each.getMessage() for each in caplog.records] == [
        "failed to compile a step for islands (0, 2): a batch of 3 rows cannot be divided"
    ]


def test_sets_that_are_far_from_the_present_islands_are_forgotten() -> None:
    trainings = Trainings()
    trainings.run(0, 1, 2, 3)
    assert trainings.ahead.forget_distant((0, 1, 2)) == []
    assert sorted(trainings.ahead.forget_distant((0, 1))) == [(0, 2, 3), (1, 2, 3)]
    assert trainings.ahead.compiled == [(0, 1, 2), (0, 1, 3)]


def test_a_compilation_that_the_loss_of_an_island_ends_is_repeated_when_the_island_is_back() -> None:
    text = Details(Kind.ISLAND, (2,)).in_text("island 2 is lost")
    trainings = Trainings(refused=(1, 2), error=jax.errors.JaxRuntimeError(f"UNAVAILABLE: {text}"))
    trainings.advance(0, 1, 2)
    trainings.threads.pop()()
    assert trainings.compiled == [(1, 2)]
    trainings.refused = ()
    trainings.run(0, 1, 2)
    assert trainings.compiled == [(1, 2), (1, 2), (0, 2), (0, 1)]
    assert trainings.ahead.compiled == [(0, 1), (0, 2), (1, 2)]


def test_a_run_continues_if_no_thread_can_be_started(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(name: str, work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    ahead = CompilationAhead(8, 1, refuse)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ahead.advance((0, 1), lambda islands: None, [], None)
    assert [each.getMessage() for each in caplog.records] == [
        f"failed to compile a step for islands {islands}: can't start new thread" for islands in ((1,), (0,))
    ]


def test_what_was_forgotten_while_it_was_compiled_does_not_count_as_compiled() -> None:
    trainings = Trainings()
    trainings.advance(0, 1, 2, 3)
    assert trainings.ahead.forget_distant((0,)) == [(1, 2, 3)]
    trainings.threads.pop()()
    assert trainings.ahead.compiled == []


def test_a_compilation_has_the_settings_of_the_thread_that_computes_the_steps() -> None:
    used: list[tuple[str, bool]] = []

    class Training:
        def compile_ahead(self, kept: Any, batch: Any) -> None:
            used.append((jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64))

    ahead = CompilationAhead(8, 1)
    with jax.default_matmul_precision("highest"), jax.enable_x64(True):
        ahead.advance((0, 1), lambda islands: Training(), [], None)
    assert eventually(lambda: ahead.compiled == [(1,)])
    assert used == [("highest", True)]
