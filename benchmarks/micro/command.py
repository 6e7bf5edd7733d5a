"""`python -m benchmarks micro`: the micro-benchmarks beside their peers, a table and a JSON file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.record import RESULTS, write
from benchmarks.harness.run import make_console, run
from benchmarks.micro.report import render
from benchmarks.micro.table import BENCHMARKS


def chosen(option: str, text: str, known: list[str]) -> list[str]:
    """Return the names in a comma-separated list, in the order of `known`, or all of them if it is empty."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    if unknown := sorted(names - set(known)):
        raise typer.BadParameter(f"{option} {', '.join(unknown)}: known are {', '.join(known)}")
    return [name for name in known if name in names or not names]


def micro(
    only: Annotated[str, typer.Option(help="keys of benchmarks, for example a,b,d; all if empty")] = "",
    backends: Annotated[str, typer.Option(help="names of backends; all if empty")] = "",
    rounds: Annotated[int | None, typer.Option(min=1, help="of each benchmark; 7, or 3 with --quick")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="less work in a round, and fewer rounds")] = False,
    name: Annotated[str, typer.Option(help="keep the result as benchmarks/results/NAME.json")] = "",
    json: Annotated[Path | None, typer.Option(help="write the result here instead")] = None,
) -> None:
    """Measure Atoll beside its peers, in turn, in one run."""
    keys = chosen("--only", only, [benchmark.key for benchmark in BENCHMARKS])
    known = list(dict.fromkeys(name for benchmark in BENCHMARKS for name in benchmark.contestants))
    competing = chosen("--backends", backends, known)
    selected = [benchmark for benchmark in BENCHMARKS if benchmark.key in keys]
    rounds = rounds or (3 if quick else 7)
    path = json or (RESULTS / f"{name or f'local/{datetime.now(UTC):%Y%m%d-%H%M%S}'}.json")
    console = make_console()
    record = run(path.stem, selected, rounds, quick, console, competing)
    write(record, path)
    console.print(render(record), f"\nwritten to {path}")
    raise typer.Exit(code=1 if any(each.failures for each in record.benchmarks) else 0)
