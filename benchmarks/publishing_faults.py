"""The results of tests/end_to_end/test_publishing_under_faults.py, and the table of them.

python -m benchmarks.publishing_faults FILE    # of the results that the test has appended to a file
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from benchmarks.harness.backends import ROOT
from benchmarks.harness.pages import write_between
from benchmarks.harness.provenance import describe_commit

RESULT = ROOT / "benchmarks" / "results" / "publishing-faults.json"
PAGE = ROOT / "docs" / "design" / "named-arrays.md"
BEGIN, END = "<!-- faults: begin (written by benchmarks.publishing_faults) -->", "<!-- faults: end -->"


class SubscriberResult(msgspec.Struct):
    """The observations of a script that reads each new version.

    Attributes:
      versions: the number of the versions that it has read.
      mixtures: versions whose arrays are not those that were published, or that differ from their checksums.
      slowest: seconds of the slowest request, with its error or its arrays.
      errors: the number of errors, by their text without numbers.
    """

    versions: int = 0
    mixtures: list[str] = []
    slowest: float = 0.0
    errors: dict[str, int] = {}


class FaultResult(msgspec.Struct, frozen=True):
    """One run of the test.

    Attributes:
      kills: the number of kills of the publisher, of the controller, and of an island of readers.
      differences: what `atoll check` finds after the scripts have ended.
      spill: the argument of `publish`.
      homes: the number of kills of the island with the published arrays.
    """

    seed: int
    commit: str | None
    kills: list[int]
    subscribers: list[SubscriberResult]
    differences: list[str]
    spill: str | None = None
    homes: int = 0


_COLUMNS = {None: "on devices", "disk": 'with `spill="disk"`'}


def table(results: list[FaultResult]) -> str:
    """Return the sum of the results as a Markdown table."""
    commits = dict.fromkeys(each.commit for each in results)
    described = ", ".join(map(describe_commit, commits))
    chosen = {spill: [each for each in results if each.spill == spill] for spill in _COLUMNS}
    columns = [_column(runs) for runs in chosen.values() if runs]
    names = [_COLUMNS[spill] for spill, runs in chosen.items() if runs]
    lines = [
        f"{len(results)} runs, {described}.",
        "",
        f"| versions | {' | '.join(names)} |",
        f"|---|{'---:|' * len(names)}",
    ]
    for row in columns[0]:
        lines.append(f"| {row} | {' | '.join(f'{each[row]:,}' for each in columns)} |")
    return "\n".join(lines)


def _column(results: list[FaultResult]) -> dict[str, float]:
    subscribers = [each for result in results for each in result.subscribers]
    publisher, controller, readers = (sum(kills) for kills in zip(*[each.kills for each in results], strict=True))
    return {
        "kills of the publisher": publisher,
        "kills of the controller": controller,
        "kills of an island of readers": readers,
        "kills of the island with the published arrays": sum(each.homes for each in results),
        "versions that three readers have read": sum(each.versions for each in subscribers),
        "versions that were mixtures": sum(len(each.mixtures) for each in subscribers),
        "requests that failed": sum(sum(each.errors.values()) for each in subscribers),
        "the slowest request, s": max(each.slowest for each in subscribers),
        "differences that `atoll check` found after the runs": sum(len(each.differences) for each in results),
    }


def write_page(page: Path = PAGE, result: Path = RESULT) -> None:
    """Put the table of a committed result between the markers of a page."""
    write_between(page, BEGIN, END, table(msgspec.json.decode(result.read_bytes(), type=list[FaultResult])))


if __name__ == "__main__":
    runs = [msgspec.json.decode(line, type=FaultResult) for line in Path(sys.argv[1]).read_bytes().splitlines()]
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
    write_page()
