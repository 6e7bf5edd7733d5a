"""The table that a person watches while the tests run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from .attempt import Listener
from .comparison import FileReport
from .markdown import percent
from .results import FileResults, Outcome, TestResult

HEADINGS = ("tests", "stock passed", "stock s", "Atoll passed", "score", "unexplained", "Atoll s")


@dataclass
class Progress(Listener):
    """A side of a file that is running now."""

    label: str
    total: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)

    def collected(self, tests: int) -> None:
        self.total = max(self.total, tests)  # a process that continues after a crash finds fewer

    def ended(self, test: str, result: TestResult) -> None:
        self.outcomes[result.outcome] += 1

    def __str__(self) -> str:
        done = self.outcomes.total()
        lost = done - self.outcomes[Outcome.PASSED] - self.outcomes[Outcome.SKIPPED]
        return f"{self.label} {done}/{self.total or '?'}" + (f", {lost} not passed" if lost else "")


@dataclass
class Row:
    stock: FileResults | None = None
    report: FileReport | None = None
    progress: Progress | None = None


class Screen:
    """One row for each file. Off a terminal, a line as each file is done instead."""

    def __init__(self, files: list[str], console: Console) -> None:
        self._rows = {name: Row() for name in files}
        self._console = console
        self._live = Live(get_renderable=self.table, console=console, refresh_per_second=2)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._console.print(self.table())

    def running(self, name: str, label: str) -> Listener:
        progress = Progress(label)
        self._rows[name].progress = progress
        return progress

    def stock_done(self, name: str, results: FileResults) -> None:
        self._rows[name].stock, self._rows[name].progress = results, None
        passed = f"{len(results.passed)} of {len(results.tests)}"
        self._say(f"{name}: stock passed {passed} in {results.seconds:.0f} s")
        for trouble in results.troubles:
            self._console.print(f"[yellow]{name}[/yellow], stock: {escape(trouble)}", highlight=False)

    def atoll_done(self, name: str, report: FileReport) -> None:
        self._rows[name].report, self._rows[name].progress = report, None
        passed = f"{report.both_passed} of {report.stock_passed}, {percent(report.score)}"
        self._say(f"{name}: Atoll passed {passed} in {report.atoll.seconds:.0f} s")

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, highlight=False)

    def table(self) -> Table:
        table = Table("file", title="JAX's tests on stock JAX and on Atoll")
        for heading in HEADINGS:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("now")
        for name, row in self._rows.items():
            table.add_row(name, *self._stock(row), *self._atoll(row), str(row.progress or ""))
        return table

    def _stock(self, row: Row) -> list[str]:
        if row.stock is None:
            return ["", "", ""]
        return [str(len(row.stock.tests)), str(len(row.stock.passed)), f"{row.stock.seconds:.0f}"]

    def _atoll(self, row: Row) -> list[str]:
        report = row.report
        if report is None:
            return ["", "", "", ""]
        unexplained = sum(difference.reason is None for difference in report.differences)
        color = "green" if not report.differences else "red" if unexplained else "yellow"
        score = f"[{color}]{percent(report.score)}[/{color}]"
        return [str(report.both_passed), score, str(unexplained), f"{report.atoll.seconds:.0f}"]
