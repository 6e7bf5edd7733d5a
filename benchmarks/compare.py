"""`python -m benchmarks compare --base REVISION`: the code here beside that of another commit, in turn, in one run.

The benchmarks are those of the code here. Only the package `atoll` is of the other commit.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table

from benchmarks.harness.backends import ROOT
from benchmarks.harness.benchmark import BASE, Benchmark
from benchmarks.harness.record import RESULTS, MetricRecord, RunRecord, write
from benchmarks.harness.run import make_console, run
from benchmarks.harness.statistics import Summary, quartiles
from benchmarks.micro.command import chosen
from benchmarks.micro.report import describe_machine, number
from benchmarks.micro.table import BENCHMARKS

HISTORY = RESULTS / "history.json"
# Smaller changes of the speed, as a fraction of it, count as the same speed.
TOLERANCE = 0.03
_LESS_IS_FASTER = {"us", "ms", "s", "B", "kB", "MB"}


class Verdict(StrEnum):
    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    UNSURE = "unsure"


class Comparison(msgspec.Struct, frozen=True):
    """A metric of both versions. `speed` is the speed here divided by the speed of the base, over pairs of rounds."""

    key: str
    name: str
    title: str
    unit: str
    base: Summary
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


class Range(msgspec.Struct, frozen=True):
    """The comparisons of two commits, measured in one run."""

    base: str
    here: str
    started: str
    rounds: int
    machine: str
    python: str
    jax: str
    busy: bool
    comparisons: list[Comparison]


def compare(
    base: Annotated[str, typer.Option(help="the commit to compare with")],
    only: Annotated[str, typer.Option(help="keys of micro-benchmarks, for example a,b,z")] = "z",
    rounds: Annotated[int, typer.Option(min=5, help="of each benchmark")] = 9,
    preparations: Annotated[int, typer.Option(min=1, help="how often the processes of both are started")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="less work in a round")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="append the result to benchmarks/results/history.json")] = False,
) -> None:
    """Measure the code here beside that of another commit. The exit status is 1 if a metric became slower.

    On a busy machine no metric is judged.
    """
    judged = [benchmark for benchmark in BENCHMARKS if benchmark.contestants[0].startswith("atoll")]
    keys = chosen("--only", only, [benchmark.key for benchmark in judged])
    pairs = [beside_base(each, preparations) for each in judged if each.key in keys]
    console = make_console()
    with worktree(base) as (commit, source):
        record = run("compare", pairs, rounds, quick, console, base=source)
    found = range_of(record, commit)
    write(record, RESULTS / "local" / f"compare-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    console.print(render(found, record))
    if keep:
        if record.busy or record.machine.commit is None:
            raise typer.BadParameter("the machine was busy, or git does not know the commit: the result is not kept")
        HISTORY.write_bytes(msgspec.json.format(msgspec.json.encode([*history(), found]), indent=1) + b"\n")
    failed = any(each.failures for each in record.benchmarks)
    slower = any(each.verdict is Verdict.SLOWER for each in found.comparisons)
    raise typer.Exit(code=1 if failed or (slower and not record.busy) else 0)


def history() -> list[Range]:
    """Return the ranges of commits that were kept, in the order in which they were measured."""
    return msgspec.json.decode(HISTORY.read_bytes(), type=list[Range]) if HISTORY.exists() else []


def beside_base(benchmark: Benchmark, preparations: int) -> Benchmark:
    """Return a benchmark that compares its first contestant with the code here to the same contestant with the base."""
    first = benchmark.contestants[0]
    special = benchmark.prepare_of.get(first, benchmark.prepare)
    return replace(
        benchmark, contestants=(first, first + BASE), prepare=special, prepare_of={}, preparations=preparations
    )


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


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def range_of(record: RunRecord, base: str) -> Range:
    """Return what a run of `beside_base` benchmarks found. Metrics that are zero in a round are left out."""
    comparisons = [
        comparison
        for benchmark in record.benchmarks
        for metric in benchmark.metrics
        if (comparison := _compare(benchmark.key, metric, benchmark.contestants)) is not None
    ]
    machine = record.machine
    return Range(
        base=base,
        here=machine.commit or "unknown",
        started=record.started,
        rounds=record.rounds,
        machine=f"{machine.cpu}, {machine.cores} cores",
        python=machine.python,
        jax=machine.packages.get("jax") or "",
        busy=record.busy,
        comparisons=comparisons,
    )


def _compare(key: str, metric: MetricRecord, contestants: list[str]) -> Comparison | None:
    here, base = (metric.samples.get(name, []) for name in contestants)
    if not here or not base or min(*here, *base) <= 0:
        return None
    pairs = list(zip(here, base, strict=True))
    low, median, high = quartiles([b / h if metric.unit in _LESS_IS_FASTER else h / b for h, b in pairs])
    return Comparison(
        key=key,
        name=metric.name,
        title=metric.title,
        unit=metric.unit,
        base=metric.summaries[contestants[1]],
        here=metric.summaries[contestants[0]],
        speed=Summary(median, low, high, len(pairs)),
    )


def render(found: Range, record: RunRecord) -> RenderableType:
    table = Table(title=f"{found.base[:9]} and {found.here[:9]}: medians of {found.rounds} rounds (quartiles)")
    table.add_column("", min_width=24)
    for title in ("base", "here", "speed here / base", ""):
        table.add_column(title, justify="right")
    for each in found.comparisons:
        cells = [f"{number(s.median)} ({number(s.low)}-{number(s.high)})" for s in (each.base, each.here, each.speed)]
        table.add_row(f"{each.key}  {each.title}, {each.unit}", *cells, "" if found.busy else each.verdict)
    failures = [f"{each.key}, {name}: {error}" for each in record.benchmarks for name, error in each.failures.items()]
    return Group(table, describe_machine(record), *failures)
