"""`python -m benchmarks compare --base REVISION`: the code here beside that of other commits, in turn, in one run.

The benchmarks are those of the code here. Only the package `atoll` is of the other commits.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from benchmarks import commit_history
from benchmarks.harness.backends import ROOT
from benchmarks.harness.benchmark import AT, Benchmark
from benchmarks.harness.provenance import DIRTY, current_commit
from benchmarks.harness.record import RESULTS, BenchmarkRecord, MetricRecord, RunRecord, write
from benchmarks.harness.run import make_console, run
from benchmarks.harness.statistics import Summary, quartiles, with_quartiles
from benchmarks.micro.command import chosen
from benchmarks.micro.report import describe_machine
from benchmarks.micro.table import BENCHMARKS

# Smaller changes of the speed, as a fraction of it, count as the same speed.
TOLERANCE = 0.03
_LESS_IS_FASTER = {"us", "ms", "s", "times", "B", "kB", "MB"}


class Verdict(StrEnum):
    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    UNSURE = "unsure"


@dataclass(frozen=True)
class Comparison:
    """A metric of all versions. `bases` has the summaries of the other commits, None for one that failed.

    `speed` is the speed here divided by the speed of the last of these commits, over pairs of rounds.
    """

    key: str
    title: str
    unit: str
    bases: list[Summary | None]
    here: Summary
    speed: Summary

    @property
    def verdict(self) -> Verdict:
        """Judge by the quartiles: half of all pairs of rounds lie between them."""
        if self.speed.high < 1 - TOLERANCE:
            return Verdict.SLOWER
        if self.speed.low > 1 + TOLERANCE:
            return Verdict.FASTER
        return Verdict.SAME if abs(self.speed.median - 1) <= TOLERANCE else Verdict.UNSURE


def compare(
    base: Annotated[list[str], typer.Option(help="a commit to compare with; repeat it, the oldest first")],
    only: Annotated[str, typer.Option(help="keys of micro-benchmarks, for example a,b,z")] = "z",
    rounds: Annotated[int, typer.Option(min=5, help="of each benchmark")] = 10,
    preparations: Annotated[int, typer.Option(min=1, help="how often the processes of all are started")] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="less work in a round")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="append the result to benchmarks/results/history.json")] = False,
    name: Annotated[str, typer.Option(help="keep the record as benchmarks/results/NAME.json")] = "",
) -> None:
    """Measure the code here beside that of other commits.

    The exit status is 1 if a metric became slower than at the last of these commits. On a busy machine no metric is
    judged.
    """
    judged = [benchmark for benchmark in BENCHMARKS if benchmark.contestants[0].startswith("atoll")]
    keys = chosen("--only", only, [benchmark.key for benchmark in judged])
    console = make_console()
    with ExitStack() as stack:
        sources = dict(stack.enter_context(worktree(each)) for each in base)
        measured = commits_to_keep(list(sources)) if keep else []
        beside = [beside_bases(each, preparations, list(sources)) for each in judged if each.key in keys]
        by_contestant = {first + AT + name: path for first in _firsts(beside) for name, path in sources.items()}
        record = run("compare", beside, rounds, quick, console, sources=by_contestant)
    found = comparisons(record)
    write(record, RESULTS / f"{name or f'local/compare-{datetime.now(UTC):%Y%m%d-%H%M%S}'}.json")
    console.print(render(found, record, list(sources)))
    if keep:
        if record.busy:
            raise typer.BadParameter("--keep: the result is not kept, because the machine was busy")
        commit_history.append(run_of(record, measured))
    failed = any(each.failures for each in record.benchmarks)
    slower = any(each.verdict is Verdict.SLOWER for each in found)
    raise typer.Exit(code=1 if failed or (slower and not record.busy) else 0)


def _firsts(benchmarks: Sequence[Benchmark]) -> set[str]:
    return {benchmark.contestants[0] for benchmark in benchmarks}


def commits_to_keep(bases: Sequence[str]) -> list[commit_history.Commit]:
    """Return the commits of a run for the history: the bases, and the one here.

    Raises typer.BadParameter if the code here has no commit, or the run would not continue the history.
    """
    here = current_commit()
    if here is None or here.endswith(DIRTY):
        raise typer.BadParameter("--keep: commit the changes of the code first")
    commits = [commit_history.Commit(each, day_of(each)) for each in (*bases, here)]
    try:
        commit_history.check_continues(commit_history.read(), commits)
    except ValueError as error:
        raise typer.BadParameter(f"--keep: {error}") from None
    return commits


def beside_bases(benchmark: Benchmark, preparations: int, commits: Sequence[str]) -> Benchmark:
    """Return a benchmark whose contestants are its first one with the code here, and with that of each commit."""
    first = benchmark.contestants[0]
    special = benchmark.prepare_of.get(first, benchmark.prepare)
    contestants = (first, *(first + AT + commit for commit in commits))
    return replace(benchmark, contestants=contestants, prepare=special, prepare_of={}, preparations=preparations)


@contextmanager
def worktree(revision: str) -> Iterator[tuple[str, str]]:
    """Check out a commit into a temporary directory. Yield its hash, and the directory with its package.

    Raises typer.BadParameter if git has no such commit.
    """
    with tempfile.TemporaryDirectory(prefix="bench-base-") as directory:
        try:
            commit = _git("rev-parse", "--verify", f"{revision}^{{commit}}").strip()
            archive = subprocess.run(
                ["git", "-C", str(ROOT), "archive", commit, "src"], capture_output=True, check=True
            ).stdout
        except subprocess.CalledProcessError as error:
            text = error.stderr if isinstance(error.stderr, str) else error.stderr.decode(errors="replace")
            raise typer.BadParameter(f"--base {revision}: {text.strip()}") from None
        subprocess.run(["tar", "-x", "-C", directory], input=archive, check=True)
        yield commit, str(Path(directory) / "src")


def day_of(commit: str) -> str:
    """Return the day on which a commit was made, ISO 8601."""
    return _git("show", "--no-patch", "--format=%cs", commit).strip()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def run_of(record: RunRecord, commits: list[commit_history.Commit]) -> commit_history.Run:
    """Return what a run of `beside_bases` benchmarks measured, for the history. The last commit is the one here."""
    machine = record.machine
    return commit_history.Run(
        commits=commits,
        started=record.started,
        rounds=record.rounds,
        machine=f"{machine.cpu}, {machine.cores} cores",
        python=machine.python,
        jax=machine.packages.get("jax") or "",
        busy=record.busy,
        rows=[
            commit_history.Row(benchmark.key, metric.name, metric.title, metric.unit, _oldest_first(benchmark, metric))
            for benchmark in record.benchmarks
            for metric in benchmark.metrics
        ],
    )


def _oldest_first(benchmark: BenchmarkRecord, metric: MetricRecord) -> list[Summary | None]:
    here, *bases = benchmark.contestants
    return [metric.summaries.get(name) for name in (*bases, here)]


def comparisons(record: RunRecord) -> list[Comparison]:
    """Return what a run of `beside_bases` benchmarks found. Metrics that are zero in a round are left out."""
    return [
        comparison
        for benchmark in record.benchmarks
        for metric in benchmark.metrics
        if (comparison := _compare(benchmark.key, metric, benchmark.contestants)) is not None
    ]


def _compare(key: str, metric: MetricRecord, contestants: list[str]) -> Comparison | None:
    first, *bases = contestants
    here, base = metric.samples.get(first, []), metric.samples.get(bases[-1], [])
    if not here or not base or min(*here, *base) <= 0:
        return None
    pairs = list(zip(here, base, strict=True))
    low, median, high = quartiles([b / h if metric.unit in _LESS_IS_FASTER else h / b for h, b in pairs])
    return Comparison(
        key=key,
        title=metric.title,
        unit=metric.unit,
        bases=[metric.summaries.get(each) for each in bases],
        here=metric.summaries[first],
        speed=Summary(median, low, high, len(pairs)),
    )


def render(found: Sequence[Comparison], record: RunRecord, bases: Sequence[str]) -> RenderableType:
    table = Table(title=f"medians of {record.rounds} rounds (quartiles)")
    table.add_column("", min_width=24)
    for title in (*(each[:9] for each in bases), "here", f"speed here / {bases[-1][:9]}", ""):
        table.add_column(title, justify="right")
    for each in found:
        summaries = (*each.bases, each.here, each.speed)
        cells = ["failed" if summary is None else with_quartiles(summary) for summary in summaries]
        table.add_row(f"{each.key}  {each.title}, {each.unit}", *cells, "" if record.busy else each.verdict)
    failures = [f"{each.key}, {name}: {error}" for each in record.benchmarks for name, error in each.failures.items()]
    return Group(table, describe_machine(record), *failures)
