"""Tests of the history of metrics: how runs are linked, and which records are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import commit_history
from benchmarks.harness.statistics import Summary, summarize


def summary(time: float | None) -> Summary | None:
    return None if time is None else summarize([time])


def run(*times: tuple[str, float | None]) -> commit_history.Run:
    """Return a run of commits, each with the time of one operation."""
    return commit_history.Run(
        commits=[commit_history.Commit(name, "2026-11-27") for name, _ in times],
        started="2026-11-27T03:00:00+00:00",
        rounds=7,
        machine="a machine",
        python="3.12",
        jax="0.12",
        busy=False,
        rows=[
            commit_history.Row("z", "read", "a read", "ms", [summary(time) for _, time in times]),
            commit_history.Row("z", "read_cpu", "a read: CPU time of all processes", "ms", [None for _ in times]),
        ],
    )


def test_an_older_run_is_scaled_to_the_commit_that_it_shares_with_the_next() -> None:
    runs = [run(("a", 8.0), ("b", 4.0)), run(("b", 2.0), ("c", 1.0))]
    assert [each.commit for each in commit_history.commits(runs)] == ["a", "b", "c"]
    assert [each.values for each in commit_history.waits(runs)] == [[4.0, 2.0, 1.0]]


def test_a_commit_that_was_not_measured_has_no_value() -> None:
    alone, runs = [run(("a", None), ("b", 4.0))], [run(("a", 8.0), ("b", None)), run(("b", 2.0), ("c", 1.0))]
    assert commit_history.waits(alone)[0].values == [None, 4.0]
    assert commit_history.waits(runs)[0].values == [None, 2.0, 1.0]


def test_a_run_continues_at_the_last_commit(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    commit_history.append(run(("a", 8.0), ("b", 4.0)), path)
    with pytest.raises(ValueError, match="the last commit of the history, b"):
        commit_history.append(run(("a", 2.0), ("c", 1.0)), path)
    commit_history.append(run(("b", 2.0), ("c", 1.0)), path)
    assert len(commit_history.read(path)) == 2
