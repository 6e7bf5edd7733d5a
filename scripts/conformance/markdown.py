"""The report as Markdown, and its place in a page kept by hand."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from .comparison import Difference, FileReport, Report

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


def embed(report: Report, page: Path) -> None:
    """Puts the report between the page's markers. Raises `MarkerError` if it has none."""
    text = page.read_text() if page.exists() else f"{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise MarkerError(f"{page} lacks the markers {BEGIN} and {END}: add them where the tables belong")
    page.write_text(f"{before}{BEGIN}\n\n{render(report)}\n{END}{after}")


def _lines(report: Report) -> Iterator[str]:
    yield (
        f"JAX {report.jax}, jaxlib {report.jaxlib}, Atoll {report.atoll}, islands `{report.islands}`, "
        f"`JAX_PLATFORMS={report.platforms}`."
    )
    yield ""
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"|---|{'---:|' * (len(HEADINGS) - 1)}"
    for name, file in report.files.items():
        yield _row(name, file)
    expected = sum(file.stock_passed for file in report.files.values())
    passed = sum(file.both_passed for file in report.files.values())
    yield f"| **all** | {expected} | {passed} | {percent(passed / expected if expected else 1.0)} | | | | |"
    yield from _troubles(report)
    yield from _explained(report)
    yield from _unexplained(report)


def _row(name: str, file: FileReport) -> str:
    unexplained = len(file.unexplained)
    cells = [
        f"`{name}`",
        file.stock_passed,
        file.both_passed,
        percent(file.score),
        len(file.differences) - unexplained,
        unexplained,
        f"{file.stock.seconds:.0f}",
        f"{file.atoll.seconds:.0f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _troubles(report: Report) -> Iterator[str]:
    told = [(name, trouble) for name, file in report.files.items() for trouble in file.atoll.troubles]
    if told:
        yield from ("", "Outside any test, on Atoll:", "")
        yield from (f"- `{name}`: {trouble}" for name, trouble in told)


def _explained(report: Report) -> Iterator[str]:
    by_reason: dict[str, list[Difference]] = defaultdict(list)
    for file in report.files.values():
        for difference in file.differences:
            if difference.reason is not None:
                by_reason[difference.reason].append(difference)
    if not by_reason:
        return
    yield from ("", "Differences with a known reason:", "")
    for reason, differences in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        yield f"<details><summary>{reason} ({len(differences)} tests)</summary>"
        yield ""
        yield from (f"- `{difference.test}`" for difference in differences)
        yield from ("", "</details>")


def _unexplained(report: Report) -> Iterator[str]:
    differences = [difference for file in report.files.values() for difference in file.unexplained]
    if differences:
        yield from ("", "**UNEXPLAINED** differences:", "")
        for difference in differences:
            yield f"- `{difference.test}`: {difference.outcome}; {difference.message.replace('`', chr(39))}"
