"""The command line of the conformance runs."""

from __future__ import annotations

import importlib.metadata
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from atoll.errors import AtollError

from . import comparison, environments, markdown, reasons, suites
from .baseline import BaselineCache
from .comparison import FileReport, Report
from .environments import Environment
from .projects import Sources, SuiteError, TestFile
from .results import FileResults, Sample
from .runner import run_file
from .screen import Screen
from .suites import Suite

CACHE = Path("~/.cache/atoll/conformance")
SHOWN = 20  # tests listed on screen for one and the same error
REASONS = Path("docs/conformance-reasons.toml")

REFUSALS = (AtollError, SuiteError, reasons.ReasonError, markdown.MarkerError, comparison.ReportError)

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def chosen_files(chosen: list[Suite], names: list[str], sources: Sources, shard: str) -> list[TestFile]:
    """The files of the suites and those asked for by name; `core` if neither is given. Of all these, the shard's."""
    if not chosen and not names:
        chosen = [Suite.CORE]
    files = [file for suite in chosen for file in suites.files_of(suite, sources)]
    files += [suites.named_file(name, sources) for name in names]
    distinct = list({file.name: file for file in files}.values())
    return suites.shard(distinct, shard, suites.measured()) if shard else distinct


def empty_report(islands: str, platforms: str, sources: Sources) -> Report:
    try:
        atoll = importlib.metadata.version("atoll")
    except importlib.metadata.PackageNotFoundError as error:
        raise SuiteError("atoll is not installed in this Python: pip install -e .") from error
    jax, jaxlib = importlib.metadata.version("jax"), importlib.metadata.version("jaxlib")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    tests = suites.checkout_version(sources) if sources.other_version else ""
    return Report(jax, jaxlib, atoll, islands, platforms, files={}, python=python, tests="" if tests == jax else tests)


def run_again(file: TestFile, atoll: Environment, before: FileReport, timeout: float, screen: Screen) -> FileReport:
    """The report of a file with its differences run again."""
    tests = [difference.test for difference in before.differences]
    listener = screen.running(file.name, "Atoll")
    return comparison.amend(before, run_file(file, atoll, timeout=timeout, only=tests, listener=listener))


def run_atoll(
    file: TestFile,
    atoll: Environment,
    expected: FileResults,
    timeout: float,
    keyword: str | None,
    sample: Sample,
    screen: Screen,
) -> FileReport:
    """The report of a file, of a sample of it, or of the tests in it that `keyword` selects."""
    listener = screen.running(file.name, "Atoll")
    # A sample is that of stock: on another runtime a file may make other test cases, and so have another n-th.
    only = list(expected.tests) if sample.every > 1 else None
    results = run_file(file, atoll, timeout=timeout, only=only, keyword=keyword, listener=listener)
    selection = results.tests if keyword and not results.troubles else None
    return comparison.compare(expected, results, within=selection, every=sample.every)


def tell(report: Report) -> int:
    """Print what went wrong. Return the number of differences without a reason, and of files that stock did not run."""
    not_run = 0
    for name, file in report.files.items():
        if not sum(file.stock.counts.values()):
            not_run += 1
            why = file.stock.troubles[0] if file.stock.troubles else "no test was collected"
            console.print(f"[red]NOT RUN[/red] {name} on stock JAX: {escape(why)}", highlight=False)
        for trouble in file.atoll.troubles:
            console.print(f"[yellow]{name}[/yellow]: {escape(trouble)}", highlight=False)
    unexplained = report.unexplained()
    for account, tests in comparison.alike(unexplained):
        console.print(f"[red]UNEXPLAINED[/red] {escape(account)}", highlight=False)
        for test in tests[:SHOWN]:
            console.print(f"  {escape(test)}", highlight=False)
        if len(tests) > SHOWN:
            console.print(f"  and {len(tests) - SHOWN} more, in the report", highlight=False)
    return len(unexplained) + not_run


def option(help_text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help_text, **limits)


def conformance(
    jax: Annotated[Path | None, option("JAX source checkout at the installed version's tag.")] = None,
    other_version: Annotated[
        bool,
        option("Accept a JAX checkout of another version than the installed one. The report names it."),
    ] = False,
    sources: Annotated[
        Path | None, option("A directory with a checkout for each other project: equinox/, flax/, orbax/.")
    ] = None,
    suite: Annotated[list[Suite] | None, option("Which files; core if no --file is given either.")] = None,
    shard: Annotated[str, option("Of these files, the part i/n: 1/4 to 4/4.")] = "",
    file: Annotated[list[str] | None, option("A file, such as array_test or optax/alias_test.")] = None,
    keyword: Annotated[str | None, option("pytest's -k, on Atoll only. No report is written.", "-k")] = None,
    every: Annotated[int, option("Run only every n-th test of each file. The table then shows the sample.", min=1)] = 1,
    first: Annotated[int, option("With --every, the number of the sample's first test, counted from 0.", min=0)] = 0,
    only_differences: Annotated[
        bool,
        option(
            "Run again, on Atoll, what differs in the last report, in all its files unless chosen.",
            "--only-differences",
        ),
    ] = False,
    stock_only: Annotated[bool, option("Only fill the cache of stock results.", "--stock-only")] = False,
    refresh_stock: Annotated[bool, option("Use no stock results of the cache.", "--refresh-stock")] = False,
    record_seconds: Annotated[
        bool, option("Keep how long the files took on stock, for shards of equal length.", "--record-seconds")
    ] = False,
    islands: Annotated[str, option("ATOLL_ISLANDS for the Atoll side.")] = "1x1x8",
    standing: Annotated[
        bool, option("On the cluster of ATOLL_JOIN or ATOLL_ADDRESS, not on an embedded one.", "--standing")
    ] = False,
    platforms: Annotated[str, option("JAX_PLATFORMS for the Atoll side.")] = "atoll,cpu",
    timeout: Annotated[float, option("Seconds that a test may take.")] = 180.0,
    cache: Annotated[Path, option("Directory for stock results and the last report.")] = CACHE,
    json: Annotated[Path | None, option("The report; report.json in the cache unless given.")] = None,
    page: Annotated[Path | None, option("A page to put the tables in.", "--markdown")] = None,
    section: Annotated[str, option("Name in the page's markers, if it has tables of several runs.")] = "",
    reason_table: Annotated[Path, option("Reasons for known differences.", "--reasons")] = REASONS,
) -> None:
    """Run the tests of JAX and of its libraries on stock JAX and on Atoll, and compare them test by test.

    Exits with 1 if a test passes on stock and not on Atoll and the table of reasons does not say why, or if stock JAX
    runs no test of a file.
    """
    if first >= every:
        raise typer.BadParameter(f"--first {first}: give a number below --every, which is {every}")
    sample = Sample(every, first)
    cache = cache.expanduser()
    report_path = json or cache / "report.json"
    stock, atoll = environments.stock(), environments.atoll("" if standing else islands, platforms)
    of_file = environments.for_file if not standing else lambda _, environment: environment
    baselines = BaselineCache(cache)
    try:
        if standing:
            islands = f"{environments.islands_of_cluster()}, standing"
        last = comparison.load(report_path)
        names = file or []
        if only_differences and not suite and not names and last is not None:
            names = [name for name, each in last.files.items() if each.differences]
        places = Sources(jax, sources, other_version)
        files = chosen_files(suite or [], names, places, shard)
        explain = reasons.read(reason_table).explain
        if page is not None:
            markdown.around(page, section)  # now, not after an hour of tests
        report = Report("", "", "", "", "", {}) if stock_only else empty_report(islands, platforms, places)
    except REFUSALS as error:
        raise typer.BadParameter(str(error)) from error

    previous = last.files if last is not None and last.comparable(report) else {}
    if only_differences:
        files = [each for each in files if each.name in previous and previous[each.name].differences]

    reports: dict[str, FileReport] = {}
    with Screen([each.name for each in files], console) as screen:
        for each in files:
            on_stock, on_atoll = (of_file(each.name, environment) for environment in (stock, atoll))
            if only_differences:
                measured = run_again(each, on_atoll, previous[each.name], timeout, screen)
            else:
                listener = screen.running(each.name, "stock")
                run_stock = partial(run_file, each, on_stock, timeout=timeout, sample=sample, listener=listener)
                expected = baselines.get_or_run(each, on_stock, run_stock, sample=sample, refresh=refresh_stock)
                screen.stock_done(each.name, expected)
                if record_seconds and every == 1:
                    suites.record({each.name: expected.seconds})
                if stock_only:
                    continue
                measured = run_atoll(each, on_atoll, expected, timeout, keyword, sample, screen)
            reports[each.name] = explain(measured)
            screen.atoll_done(each.name, reports[each.name])
            if keyword is None:  # after each file: an interrupted run keeps what it has
                kept = {name: explain(of_before) for name, of_before in previous.items()}
                comparison.save(report.holding(kept | reports), report_path)
    if page is not None and keyword is None and (written := comparison.load(report_path)) is not None:
        markdown.embed(written, page, section)
    raise typer.Exit(1 if tell(report.holding(reports)) else 0)


if __name__ == "__main__":
    typer.run(conformance)
