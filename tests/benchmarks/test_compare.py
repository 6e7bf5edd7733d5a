"""Tests of comparing two versions: where the other version comes from, and how metrics are judged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer

from benchmarks import commit_history
from benchmarks.compare import Comparison, Verdict, beside_bases, comparisons, run_of, worktree
from benchmarks.harness.backends import ROOT, environment_of
from benchmarks.harness.benchmark import AT, Benchmark, Metric, Round, RunsIn, Settings
from benchmarks.harness.machine import describe
from benchmarks.harness.record import RunRecord
from benchmarks.harness.rounds import run_benchmark
from benchmarks.harness.statistics import summarize


def prepare(settings: Settings) -> Round:
    """Make rounds in which the base takes twice as long and has half the rate."""
    seconds = 2.0 if settings.source else 1.0

    def measure() -> Mapping[str, float]:
        return {"time": seconds, "rate": 1 / seconds, "nothing": 0.0}

    return measure


BENCHMARK = Benchmark(
    "x",
    "a benchmark",
    "tests.benchmarks.test_compare:prepare",
    (Metric("time", "a time", "ms"), Metric("rate", "a rate", "calls/s"), Metric("nothing", "nothing", "ms")),
    runs_in=RunsIn.PARENT,
)


def compared(*sources: str) -> RunRecord:
    """Compare this code with commits named after the directories of their packages."""
    benchmark = beside_bases(BENCHMARK, preparations=2, commits=sources)
    of_names = {f"atoll{AT}{source}": source for source in sources}
    found = run_benchmark(benchmark, list(benchmark.contestants), 6, False, lambda now, done: None, of_names)
    return RunRecord("compare", "", 0.0, [], 6, False, describe(), 0.0, 0.0, False, [found])


def test_speed_is_judged_by_the_unit_of_a_metric() -> None:
    found = {each.title: (each.speed.median, each.verdict) for each in comparisons(compared("/base"))}
    twice = (2.0, Verdict.FASTER)
    assert found == {"a time": twice, "a rate": twice}, "and a metric of zero is left out"


def test_a_run_for_the_history_has_the_oldest_commit_first() -> None:
    commits = [commit_history.Commit(name, "2026-11-27") for name in ("/base", "", "here")]
    times = run_of(compared("/base", ""), commits).rows[0].summaries
    assert [each.median for each in times if each is not None] == [2.0, 1.0, 1.0]


def test_the_same_code_is_the_same() -> None:
    assert {each.verdict for each in comparisons(compared(""))} == {Verdict.SAME}


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [
        ([0.9, 0.92, 0.95, 0.96, 0.9], Verdict.SLOWER),
        ([0.9, 0.92, 0.95, 1.1, 1.2], Verdict.UNSURE),
        ([0.97, 0.99, 1.0, 1.01, 1.2], Verdict.SAME),
        ([1.04, 1.1, 1.05, 1.2, 1.3], Verdict.FASTER),
    ],
)
def test_a_metric_is_slower_only_if_most_pairs_of_rounds_agree(speeds: list[float], verdict: Verdict) -> None:
    one = summarize([1.0])
    assert Comparison("x", "a time", "ms", [one], one, summarize(speeds)).verdict is verdict


def test_processes_of_the_base_import_the_package_of_the_base(tmp_path: Path) -> None:
    (tmp_path / "atoll").mkdir()
    (tmp_path / "atoll" / "__init__.py").write_text("")
    command = [sys.executable, "-c", "import atoll, benchmarks; print(atoll.__file__, benchmarks.__file__, sep='\\n')"]
    settings = Settings("atoll" + AT + "abc", source=str(tmp_path))
    ended = subprocess.run(command, env=environment_of(settings), capture_output=True, text=True, check=True)
    expected = [str(tmp_path / "atoll" / "__init__.py"), str(ROOT / "benchmarks" / "__init__.py")]
    assert ended.stdout.splitlines() == expected


def test_a_commit_that_git_does_not_have_is_refused() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    with pytest.raises(typer.BadParameter, match="--base no-such-commit"), worktree("no-such-commit"):
        pass


def test_the_package_of_a_commit_is_taken_from_git() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    with worktree("HEAD") as (commit, source):
        assert len(commit) == 40
        assert (Path(source) / "atoll" / "__init__.py").exists()
    assert not os.path.exists(source)
