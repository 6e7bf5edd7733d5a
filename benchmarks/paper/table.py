"""A figure's numbers on screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.harness.record import BenchmarkRecord, Claim, RunRecord
from benchmarks.harness.statistics import Summary, number, with_quartiles
from benchmarks.micro.report import describe_machine


def render(run: RunRecord, title: str) -> RenderableType:
    table = Table(title=f"{run.name}: {title}; medians of {run.rounds} rounds (quartiles)")
    header, *rows = cells(run)
    for name in header:
        table.add_column(name, justify="left" if name == header[0] else "right")
    for row in rows:
        table.add_row(*row)
    claims = Table(title="claims")
    for name in ("claim", "measured", "target", "met"):
        claims.add_column(name)
    for claim in run.claims:
        style = {True: "green", False: "bold red", None: "dim"}[claim.reached]
        claims.add_row(claim.text, *(Text(part, style=style) for part in words(claim, not run.busy)))
    failures = [
        Text(f"{point.title}, {name} failed: {last_words(error)}", style="red")
        for point in run.benchmarks
        for name, error in point.failures.items()
    ]
    return Group(table, *([claims] if run.claims else []), describe_machine(run), *failures)


def last_words(error: str) -> str:
    """Of a traceback with the end of a log: the exception. The record has all of it."""
    lines = [line for line in error.partition("the end of its log:")[0].splitlines() if line.strip()]
    return lines[-1].strip() if lines else error


def words(claim: Claim, counts: bool = True) -> tuple[str, str, str]:
    """Return its value, its bound, and whether it holds, if the run counts: if the machine was not busy."""
    value = "not measured" if claim.value is None else number(claim.value)
    if claim.beyond is not None:
        value = f"above {number(claim.beyond)} (never reached)"
    verdict = {True: "yes", False: "no", None: ""}[claim.reached] if counts else "not counted"
    return value, f"{'≥' if claim.at_least else '≤'} {claim.bound:g}", verdict


def cells(run: RunRecord) -> list[list[str]]:
    """Return a header, and a row for each point and contestant."""
    names = list(dict.fromkeys(metric.name for point in run.benchmarks for metric in point.metrics))
    titles = {
        metric.name: f"{metric.title}, {metric.unit}".removesuffix(", ")
        for point in run.benchmarks
        for metric in point.metrics
    }
    rows = [["", "", *(titles[name] for name in names)]]
    for point in run.benchmarks:
        rows.extend(_row(point, contestant, names) for contestant in point.contestants)
    return rows


def _row(point: BenchmarkRecord, contestant: str, names: Sequence[str]) -> list[str]:
    if contestant in point.failures:
        return [point.title, contestant, *("failed" for _ in names)]
    by_name: Mapping[str, Summary | None] = {metric.name: metric.summaries.get(contestant) for metric in point.metrics}
    return [point.title, contestant, *(_cell(by_name.get(name)) for name in names)]


def _cell(summary: Summary | None) -> str:
    if summary is None:
        return ""
    if summary.low == summary.high:
        return number(summary.median)
    return with_quartiles(summary)
