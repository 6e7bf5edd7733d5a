"""Retries: pauses, deadlines, and problems that are logged once per reason."""

from __future__ import annotations

import ast
import asyncio
import logging
import math

import pytest

from atoll.retries import Reasons, Retry
from tests.prose import dotted, nodes_of
from tests.test_layers import modules

pytestmark = pytest.mark.together("sources")


class Flaky:
    """Fails with the given errors, one per call, and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls

    async def later(self) -> int:
        return self()


def test_pauses_grow_to_the_largest_and_vary_by_a_fifth() -> None:
    retry = Retry(1.0, 5.0)
    for expected in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert 0.8 * expected <= retry.next_pause() <= 1.2 * expected
    retry.reset()
    assert 0.8 <= retry.next_pause() <= 1.2


def test_pauses_are_constant_without_a_largest_one_and_differ_between_processes() -> None:
    retry = Retry(1.0)
    pauses = [retry.next_pause() for _ in range(50)]
    assert all(0.8 <= each <= 1.2 for each in pauses)
    assert len(set(pauses)) > 1


def test_no_pause_reaches_beyond_the_deadline() -> None:
    assert Retry(1000.0, patience=1.0).next_pause() <= 1.0
    over = Retry(1000.0, patience=0.0)
    assert over.is_over
    assert over.next_pause() == 0.0
    assert not Retry(1.0).is_over


@pytest.mark.parametrize("is_async", [False, True])
def test_an_operation_is_repeated_until_it_succeeds(is_async: bool) -> None:
    flaky, retry = Flaky(ConnectionError(), TimeoutError()), Retry(1e-4)
    on = (ConnectionError, TimeoutError)
    result = asyncio.run(retry.call_async(flaky.later, on)) if is_async else retry.call(flaky, on)
    assert result == flaky.calls == 3


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "patience"),
    [
        (ConnectionError("late"), 0.0),  # its time has passed
        (ConnectionRefusedError("refused"), math.inf),  # it is one of those that are raised at once
        (ValueError("wrong"), math.inf),  # it is not one of those that are tried again
    ],
)
def test_an_error_that_ends_the_attempts_is_raised(error: Exception, patience: float, is_async: bool) -> None:
    flaky, retry = Flaky(error), Retry(1e-4, patience=patience)
    types = ConnectionError, ConnectionRefusedError
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(retry.call_async(flaky.later, *types)) if is_async else retry.call(flaky, *types)
    assert flaky.calls == 1


def test_a_lasting_problem_is_logged_once_per_reason(caplog: pytest.LogCaptureFixture) -> None:
    problems = Reasons(logging.getLogger("atoll.test"))
    assert not problems
    for reason in ("away", "away", "refused", "away"):
        problems.log(reason)
    assert problems
    problems.solved()
    problems.log("away")
    assert caplog.messages == ["away", "refused", "away"]


def test_pauses_after_a_failure_are_those_of_a_retry() -> None:
    """A handler of an error that sleeps for a fixed time is a retry written by hand."""
    found = {
        name
        for name, path in modules().items()
        for handler in nodes_of(path)
        if isinstance(handler, ast.ExceptHandler)
        for node in ast.walk(handler)
        if isinstance(node, ast.Call) and dotted(node.func) in ("time.sleep", "asyncio.sleep")
    }
    assert found == set()
