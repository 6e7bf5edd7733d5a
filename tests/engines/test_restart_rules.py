"""Tests of the rules for restarts and for attempts to start processes."""

from __future__ import annotations

import errno

import pytest

from atoll.engines.restart_rules import MAX_RESTARTS, RESTART_SPAN_SECONDS, RestartPolicy, StartRetries

LACKING, OTHER = OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENOENT, "No such file or directory")


@pytest.mark.parametrize(("later", "allowed"), [(RESTART_SPAN_SECONDS - 0.1, False), (RESTART_SPAN_SECONDS, True)])
def test_restarts_are_counted_in_a_sliding_span(later: float, allowed: bool) -> None:
    policy = RestartPolicy()
    for _ in range(3 * MAX_RESTARTS):
        assert policy.allow(100.0)
        policy.excuse()
    assert all(policy.allow(100.0) for _ in range(MAX_RESTARTS))
    assert policy.allow(100.0 + later) is allowed


def test_a_start_that_lacks_something_is_repeated_for_a_span_from_its_first_failure() -> None:
    warnings: list[str] = []
    retries = StartRetries("the controller", lambda text, *values: warnings.append(text % values))
    assert retries.allow(LACKING, 100.0)
    assert retries.is_lacking
    (warning,) = warnings
    assert warning == f"the controller cannot be started now, will retry for 60 s: {LACKING}"
    assert retries.allow(LACKING, 100.0 + RESTART_SPAN_SECONDS - 0.1)
    assert not retries.allow(LACKING, 100.0 + RESTART_SPAN_SECONDS)
    assert len(warnings) == 1, "only the first failure is new"
    retries.started()
    assert not retries.is_lacking
    assert retries.allow(LACKING, 200.0 + RESTART_SPAN_SECONDS)
    assert len(warnings) == 2


def test_a_start_that_fails_for_another_reason_is_not_repeated() -> None:
    warnings: list[str] = []
    retries = StartRetries("the controller", lambda text, *values: warnings.append(text % values))
    assert not retries.allow(OTHER, 100.0)
    assert not retries.is_lacking
    assert not warnings
