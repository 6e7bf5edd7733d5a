"""Runs benchmarks one after the other, with a bar for each, and keeps all of it as one record."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.machine import describe, load_average, until_quiet
from benchmarks.harness.record import BUSY_CPUS, BenchmarkRecord, RunRecord
from benchmarks.harness.rounds import run_benchmark

_WIDTH = 140  # of a table where there is no terminal to ask


def make_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


def run(
    name: str,
    benchmarks: Sequence[Benchmark],
    rounds: int,
    quick: bool,
    console: Console,
    competing: Collection[str] | None = None,
    sources: Mapping[str, str] | None = None,
) -> RunRecord:
    """All benchmarks; of their contestants only those in `competing`, if it is given. `sources` is for
    `run_benchmark`."""
    busy_cpus = until_quiet(BUSY_CPUS)
    started, load_before, clock = datetime.now(UTC), load_average(), time.monotonic()
    machine = describe()  # before the code can change
    records = [_run_with_bar(benchmark, competing, rounds, quick, console, sources) for benchmark in benchmarks]
    return RunRecord(
        name=name,
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - clock,
        command=["python", "-m", "benchmarks", *sys.argv[1:]],
        rounds=rounds,
        quick=quick,
        machine=machine,
        load_before=load_before,
        load_after=load_average(),
        busy=busy_cpus > BUSY_CPUS,
        benchmarks=records,
        busy_cpus=busy_cpus,
    )


def _run_with_bar(
    benchmark: Benchmark,
    competing: Collection[str] | None,
    rounds: int,
    quick: bool,
    console: Console,
    sources: Mapping[str, str] | None,
) -> BenchmarkRecord:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
    with Progress(
        TextColumn("{task.description}"),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(f"({benchmark.key}) {benchmark.title}", total=rounds, now="")
        contestants = [name for name in benchmark.contestants if competing is None or name in competing]
        report = partial(_report, progress, task)
        clock = time.monotonic()
        record = run_benchmark(benchmark, contestants, rounds, quick, report, sources)
    if not console.is_terminal:  # which shows no bar: a run of many minutes says how far it is
        console.print(f"({benchmark.key}) {benchmark.title}: {time.monotonic() - clock:.0f} s", soft_wrap=True)
    return record


def _report(progress: Progress, task: object, now: str, done: int) -> None:
    progress.update(task, completed=done, now=now)  # type: ignore[arg-type]
