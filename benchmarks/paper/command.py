"""`python -m benchmarks FIGURE`, `python -m benchmarks all` and `python -m benchmarks report`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from benchmarks.harness.backends import ROOT
from benchmarks.harness.record import RESULTS, write
from benchmarks.harness.run import make_console, run
from benchmarks.paper import figures
from benchmarks.paper.costs import FILE as COSTS_FILE
from benchmarks.paper.costs import costs_of, measured_costs
from benchmarks.paper.costs import points as cost_points
from benchmarks.paper.costs import rows as cost_rows
from benchmarks.paper.figure import Figure, Options
from benchmarks.paper.markdown import write_page
from benchmarks.paper.plot import draw, require_matplotlib
from benchmarks.paper.table import render
from benchmarks.paper.trace_plot import draw_traces
from benchmarks.paper.traces import take_trace

_ROUNDS_OF_COSTS, _QUICK_ROUNDS = 5, 2

Hosts = Annotated[str, typer.Option(help="how many, such as 1,2,4; the figure's own if empty")]
DevicesPerHost = Annotated[int, typer.Option(min=1, help="of real devices")]
Null = Annotated[bool, typer.Option("--null", help="null devices: the real control plane, which computes nothing")]
Quick = Annotated[bool, typer.Option("--quick", help="fewer points and rounds, and less work in each")]
Rounds = Annotated[int | None, typer.Option(min=1, help=f"of each point; its own, or {_QUICK_ROUNDS} with --quick")]
Results = Annotated[Path, typer.Option(help="where JSON and PNG files go")]


def add_to(app: typer.Typer) -> None:
    """Adds all commands."""
    for figure in figures.FIGURES:
        text: dict[str, Any] = {"help": figure.title, "short_help": figure.title, "epilog": figure.explanation}
        app.command(figure.key, **text)(_command_of(figure))
    app.command("costs")(costs)
    app.command("all")(measure_all)
    app.command("report")(report)


def _command_of(figure: Figure) -> Callable[..., None]:
    def command(
        hosts: Hosts = "",
        devices_per_host: DevicesPerHost = 2,
        null: Null = False,
        quick: Quick = False,
        rounds: Rounds = None,
        results: Results = RESULTS,
    ) -> None:
        options = Options(_numbers(hosts), devices_per_host, null, quick)
        if not figure.points(options):
            raise typer.BadParameter(f"{figure.key} has {'no' if null else 'only'} null devices", param_hint="--null")
        if not _measure(figure, options, rounds, results):
            raise typer.Exit(1)

    return command


def measure_all(quick: Quick = False, rounds: Rounds = None, results: Results = RESULTS) -> None:
    """Measure the costs of virtual time, then every figure and table, on real and on null devices."""
    started = time.monotonic()
    sound = _measure_costs(quick, rounds, results)
    for figure in figures.FIGURES:
        for null in (False, True):
            options = Options(null=null, quick=quick)
            if figure.points(options):
                sound &= _measure(figure, options, rounds, results)
    make_console().print(f"all of it took {time.monotonic() - started:.0f} s")
    if not sound:
        raise typer.Exit(1)


def costs(quick: Quick = False, rounds: Rounds = None, results: Results = RESULTS) -> None:
    """Measure what the control plane and the data path cost: figures in virtual time are computed with that."""
    if not _measure_costs(quick, rounds, results):
        raise typer.Exit(1)


def _measure_costs(quick: bool, rounds: int | None, results: Path) -> bool:
    console = make_console()
    record = run("costs", cost_points(quick), rounds or (_QUICK_ROUNDS if quick else _ROUNDS_OF_COSTS), quick, console)
    path = (results / "quick" if quick else results) / COSTS_FILE
    write(record, path)
    console.print(render(record, "what the figures in virtual time are computed with"))
    if any(point.failures for point in record.benchmarks):
        return False
    for what, how_much in cost_rows(costs_of(record)):
        console.print(f"{what}: {how_much}")
    console.print(f"\nwritten to {path}")
    return True


def report(
    results: Results = RESULTS,
    page: Annotated[Path, typer.Option(help="what is written")] = ROOT / "docs" / "project" / "benchmarks.md",
) -> None:
    """Write docs/project/benchmarks.md from what is in benchmarks/results."""
    shown = write_page(figures.FIGURES, results, page)
    make_console().print(f"{page}: {', '.join(shown) or 'nothing was measured yet'}")


def _measure(figure: Figure, options: Options, rounds: int | None, results: Path) -> bool:
    """Measures, shows and keeps it; whether no contestant failed."""
    require_matplotlib()
    console = make_console()
    name = f"{figure.key}-null" if options.null else figure.key
    points = figure.points(options)
    rounds = rounds or (_QUICK_ROUNDS if options.quick else figure.rounds)
    record = run(name, points, rounds, options.quick, console)
    claims = list(figure.claims(record.benchmarks, options))
    undisturbed = figure.virtual and options.null
    costs = msgspec.to_builtins(measured_costs()) if undisturbed else {}
    record = msgspec.structs.replace(record, claims=claims, costs=costs, busy=record.busy and not undisturbed)
    directory = results / "quick" if options.quick else results
    write(record, directory / f"{name}.json")
    if figure.axes is not None:
        draw(
            record, f"{figure.title}{' (null devices)' if options.null else ''}", figure.axes, directory / f"{name}.png"
        )
    traced = _trace(figure, options, directory, name, console)
    console.print(render(record, figure.title), f"\nwritten to {directory / name}.json")
    return traced and not any(point.failures for point in record.benchmarks)


def _trace(figure: Figure, options: Options, directory: Path, name: str, console: Console) -> bool:
    """Takes the figure's traces, if it has some, and draws them; whether all could be taken."""
    panels = []
    for number, trace in enumerate(figure.traces(options)):
        path = directory / f"{name}-{number}.trace.json.gz"
        try:
            take_trace(trace, path)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            console.print(str(error))
            return False
        panels.append((trace.title, path, trace.milliseconds))
    if panels:
        draw_traces(panels, f"{figure.title}{' (null devices)' if options.null else ''}", directory / f"{name}.png")
    return True


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of numbers, such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))
