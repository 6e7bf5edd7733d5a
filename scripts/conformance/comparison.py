"""Stock and Atoll held against each other, file by file; what a report says and how it is kept.

A file's score is the number of tests that passed on both, over the number that passed on stock. Tests that
stock skips or fails count for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from .results import FileResults, Outcome, TestResult


class ReportError(Exception):
    """A file is not the report it was taken for."""


class Difference(msgspec.Struct, frozen=True):
    """A test that passed on stock and not on Atoll. `reason` is None as long as nobody has explained it."""

    test: str
    outcome: Outcome
    message: str
    reason: str | None = None


class Side(msgspec.Struct, frozen=True):
    """One runtime's results of a file, counted by outcome."""

    counts: dict[str, int]
    seconds: float
    troubles: list[str] = []


class FileReport(msgspec.Struct, frozen=True):
    stock: Side
    atoll: Side
    stock_passed: int
    differences: list[Difference]
    only_on_atoll: list[str]  # passed on Atoll and not on stock
    every: int = 1  # a sample: so many tests of the file stand for one that was run

    @property
    def both_passed(self) -> int:
        return self.stock_passed - len(self.differences)

    @property
    def score(self) -> float:
        """Return the score, which is 1.0 if no test passes on stock."""
        return self.both_passed / self.stock_passed if self.stock_passed else 1.0


class Report(msgspec.Struct, frozen=True):
    """One line of products, and the files measured with it."""

    jax: str
    jaxlib: str
    atoll: str
    islands: str
    platforms: str
    files: dict[str, FileReport]
    python: str = ""  # older reports do not say
    tests: str = ""  # the version of JAX's tests, if it is not that of JAX

    def comparable(self, other: Report) -> bool:
        """Whether both were made with the same products and settings."""
        return self.holding({}) == other.holding({})

    def unexplained(self) -> list[Difference]:
        every = (difference for file in self.files.values() for difference in file.differences)
        return [difference for difference in every if difference.reason is None]

    def holding(self, files: dict[str, FileReport]) -> Report:
        """A report with the same products and these files."""
        return msgspec.structs.replace(self, files=files)


def compare(
    stock: FileResults, atoll: FileResults, within: Collection[str] | None = None, every: int = 1
) -> FileReport:
    """Compares two runs of a file, or of `every` so many of its tests; `within` restricts it to these tests."""
    expected = sorted(stock.passed if within is None else stock.passed.intersection(within))
    unseen = TestResult(Outcome.ABSENT, atoll.troubles[0] if atoll.troubles else "not among the collected tests")
    results = {test: atoll.tests.get(test, unseen) for test in expected}
    return FileReport(
        stock=Side(stock.counts(), stock.seconds, stock.troubles),
        atoll=Side(atoll.counts(), atoll.seconds, atoll.troubles),
        stock_passed=len(expected),
        differences=[
            Difference(test, result.outcome, result.message)
            for test, result in results.items()
            if result.outcome is not Outcome.PASSED
        ],
        only_on_atoll=sorted(atoll.passed - stock.passed),
        every=every,
    )


def amend(previous: FileReport, rerun: FileResults) -> FileReport:
    """The previous report with its differences run again; what passed this time is no difference any more."""
    counts = dict(previous.atoll.counts)
    differences = []
    for difference in previous.differences:
        result = rerun.tests.get(difference.test, TestResult(Outcome.ABSENT, "not among the collected tests"))
        move(counts, difference.outcome, result.outcome)
        if result.outcome is not Outcome.PASSED:
            differences.append(Difference(difference.test, result.outcome, result.message))
    atoll = Side(counts, previous.atoll.seconds, rerun.troubles)
    return msgspec.structs.replace(previous, atoll=atoll, differences=differences)


def move(counts: dict[str, int], before: Outcome, after: Outcome) -> None:
    """Count a test under another outcome. ABSENT tests are not counted."""
    if before is not Outcome.ABSENT:
        counts[before] -= 1
    if after is not Outcome.ABSENT:
        counts[after] = counts.get(after, 0) + 1


def explained(report: FileReport, reasons: Mapping[str, str | None]) -> FileReport:
    """The report with `reasons[test]` at each difference."""
    return msgspec.structs.replace(
        report,
        differences=[
            msgspec.structs.replace(difference, reason=reasons[difference.test]) for difference in report.differences
        ],
    )


def alike(differences: Iterable[Difference]) -> list[tuple[str, list[str]]]:
    """Differences of the same outcome and error together: an account of it, and the tests."""
    groups: dict[str, list[str]] = defaultdict(list)
    for difference in differences:
        groups[f"{difference.outcome}; {difference.message}"].append(difference.test)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def load(path: Path) -> Report | None:
    """Return the report at `path`, or None if the file is missing.

    Raise `ReportError` if the file is something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ReportError(f"{path} is not a conformance report ({error}): move it away") from error


def save(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
