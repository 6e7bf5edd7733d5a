"""`atoll bench micro`: the micro-benchmarks beside their peers, a table and a JSON file."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from atoll.bench.harness.backends import BACKENDS
from atoll.bench.harness.benchmark import Benchmark
from atoll.bench.harness.machine import describe, load_average
from atoll.bench.harness.record import BUSY_LOAD, RESULTS, BenchmarkRecord, RunRecord, write
from atoll.bench.harness.rounds import run_benchmark
from atoll.bench.micro.report import render
from atoll.bench.micro.table import BENCHMARKS

WIDTH = 140  # of the table where there is no terminal to ask


def chosen(option: str, text: str, known: list[str]) -> list[str]:
    """The names of a comma-separated list, in the order of `known`; all if it is empty."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    if unknown := sorted(names - set(known)):
        raise typer.BadParameter(f"{option} {', '.join(unknown)}: known are {', '.join(known)}")
    return [name for name in known if name in names or not names]


def micro(
    only: Annotated[str, typer.Option(help="keys of benchmarks, for example a,b,d; all if empty")] = "",
    backends: Annotated[str, typer.Option(help="names of backends; all if empty")] = "",
    rounds: Annotated[int | None, typer.Option(min=1, help="of each benchmark; 7, or 3 with --quick")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="less work in a round, and fewer rounds")] = False,
    name: Annotated[str, typer.Option(help="keep the result as bench/results/NAME.json")] = "",
    json: Annotated[Path | None, typer.Option(help="write the result here instead")] = None,
) -> None:
    """Measure Atoll beside its peers, in turn, in one run."""
    keys = chosen("--only", only, [benchmark.key for benchmark in BENCHMARKS])
    competing = chosen("--backends", backends, list(BACKENDS))
    selected = [benchmark for benchmark in BENCHMARKS if benchmark.key in keys]
    rounds = rounds or (3 if quick else 7)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    now = datetime.now(UTC)
    path = json or (RESULTS / f"{name}.json" if name else RESULTS / "local" / f"{now:%Y%m%d-%H%M%S}.json")

    load_before, started = load_average(), time.monotonic()
    records = [run_with_bar(benchmark, competing, rounds, quick, console) for benchmark in selected]
    run = RunRecord(
        name=path.stem,
        started=now.isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
        command=["atoll", *sys.argv[1:]],
        rounds=rounds,
        quick=quick,
        machine=describe(),
        load_before=load_before,
        load_after=load_average(),
        busy=load_before > BUSY_LOAD,
        benchmarks=records,
    )
    write(run, path)
    console.print(render(run), f"\nwritten to {path}")
    raise typer.Exit(code=1 if any(record.failures for record in records) else 0)


def run_with_bar(
    benchmark: Benchmark, competing: list[str], rounds: int, quick: bool, console: Console
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

        def report(now: str, done: int) -> None:
            progress.update(task, completed=done, now=now)

        contestants = [name for name in benchmark.contestants if name in competing]
        return run_benchmark(benchmark, contestants, rounds, quick, report)

