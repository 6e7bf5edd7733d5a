"""The report as Markdown, and its place in a page kept by hand."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from atoll.quantities import counted

from .comparison import FileReport, Report, Side, alike

BEGIN = "<!-- conformance: begin (written by scripts/conformance) -->"
END = "<!-- conformance: end -->"
HEADINGS = (
    "file",
    "passed on stock",
    "of these on Atoll",
    "score",
    "explained",
    "unexplained",
    "stock s",
    "Atoll s",
)


class MarkerError(Exception):
    """The page has no place for the report."""


def percent(score: float) -> str:
    """Rounded down: 100.0 % means all."""
    return f"{math.floor(score * 1000) / 10:.1f} %"


def render(report: Report) -> str:
    return "\n".join(_lines(report)) + "\n"


def markers(section: str) -> tuple[str, str]:
    """The markers around the tables of a section. A page may have a section per setting, such as `2x1x4`."""
    name = f" {section}:" if section else ":"
    return BEGIN.replace(":", name, 1), END.replace(":", name, 1)


def embed(report: Report, page: Path, section: str = "") -> None:
    """Puts the report between the page's markers of the section. Raises `MarkerError` if it has none."""
    before, after = around(page, section)
    begin, end = markers(section)
    page.write_text(f"{before}{begin}\n\n{render(report)}\n{end}{after}")


def around(page: Path, section: str = "") -> tuple[str, str]:
    """Return the text before and after the markers, or nothing if there is no page yet. Raise `MarkerError`."""
    begin, end = markers(section)
    text = page.read_text() if page.exists() else f"{begin}\n{end}\n"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise MarkerError(f"{page} lacks the markers {begin} and {end}: add them where the tables belong")
    return before, after


def _lines(report: Report) -> Iterator[str]:
    python = f"Python {report.python}, " if report.python else ""
    tests = f" JAX's tests are those of version {report.tests}." if report.tests else ""
    yield (
        f"{python}JAX {report.jax}, jaxlib {report.jaxlib}, Atoll {report.atoll}, islands `{report.islands}`, "
        f"`JAX_PLATFORMS={report.platforms}`.{tests}"
    )
    yield ""
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"|---|{'---:|' * (len(HEADINGS) - 1)}"
    for name, file in report.files.items():
        if file.stock_passed:
            yield _row(name, file)
    expected = sum(file.stock_passed for file in report.files.values())
    passed = sum(file.both_passed for file in report.files.values())
    yield f"| **all** | {expected} | {passed} | {percent(passed / expected if expected else 1.0)} | | | | |"
    yield from _nothing_to_compare(report)
    yield from _troubles(report)
    yield from _explained(report)
    yield from _unexplained(report)


def _row(name: str, file: FileReport) -> str:
    unexplained = sum(difference.reason is None for difference in file.differences)
    cells = [
        f"`{name}`" + (f", one test in {file.every}" if file.every > 1 else ""),
        file.stock_passed,
        file.both_passed,
        percent(file.score),
        len(file.differences) - unexplained,
        unexplained,
        f"{file.stock.seconds:.0f}",
        f"{file.atoll.seconds:.0f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _nothing_to_compare(report: Report) -> Iterator[str]:
    empty = [(name, file.stock) for name, file in report.files.items() if not file.stock_passed]
    if empty:
        yield from ("", "No test of these files passes on stock JAX:", "")
        yield from (f"- `{name}`: {'; '.join(side.troubles) or _counts(side)}" for name, side in empty)


def _counts(side: Side) -> str:
    """Describe the outcomes of a file's tests: "8 skipped, 1 failed"."""
    return ", ".join(f"{number} {outcome}" for outcome, number in side.counts.items()) or "it has none"


def _troubles(report: Report) -> Iterator[str]:
    troubled = [(name, trouble) for name, file in report.files.items() for trouble in file.atoll.troubles]
    if troubled:
        yield from ("", "Outside any test, on Atoll:", "")
        yield from (f"- `{name}`: {trouble}" for name, trouble in troubled)


def _explained(report: Report) -> Iterator[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for file in report.files.values():
        for difference in file.differences:
            if difference.reason is not None:
                by_reason[difference.reason].append(difference.test)
    if by_reason:
        yield from ("", "Differences with a known reason:")
    for reason, tests in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        yield from _folded(reason, tests)


def _unexplained(report: Report) -> Iterator[str]:
    groups = alike(report.unexplained())
    if groups:
        yield from ("", "**UNEXPLAINED** differences:")
    for account, tests in groups:
        yield from _folded(f"<code>{html.escape(account)}</code>", tests)


def _folded(summary: str, tests: list[str]) -> Iterator[str]:
    yield from ("", f"<details><summary>{summary} ({counted(len(tests), 'test')})</summary>", "")
    yield from (f"- `{test}`" for test in tests)
    yield from ("", "</details>")
