"""Results of tests that kill processes, and the tables of these results.

ATOLL_TEST_RESULTS=FILE pytest -m thorough ...    # each of the tests appends its result to FILE
python -m benchmarks.fault_runs FILE              # commit these results, and write the tables

The tests are `test_publishing_under_faults`, `test_order_over_islands` and `test_reads_under_faults` in
`tests/end_to_end`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from benchmarks.harness.backends import ROOT
from benchmarks.harness.pages import write_between
from benchmarks.harness.provenance import describe_commit

RESULTS = ROOT / "benchmarks" / "results"
DESIGN = ROOT / "docs" / "design"


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


class FaultRun(msgspec.Struct, frozen=True, tag_field="test"):
    """One run of a test that kills processes."""

    commit: str | None


class PublishingRun(FaultRun, frozen=True, kw_only=True, tag="publishing"):
    """One run of `test_publishing_under_faults`.

    Attributes:
      kills: the number of kills of the publisher, of the controller, and of an island of readers.
      differences: what `atoll check` finds after the scripts have ended.
      spill: the argument of `publish`.
      homes: the number of kills of the island with the published arrays.
    """

    seed: int
    kills: list[int]
    subscribers: list[SubscriberResult]
    differences: list[str]
    spill: str | None = None
    homes: int = 0


class CollectivesRun(FaultRun, frozen=True, kw_only=True, tag="collectives"):
    """One run of `test_order_over_islands`. The lists have an element per client.

    Attributes:
      seconds: the duration of the run.
      kills: the number of killed workers.
      sums: the number of collectives that returned a value.
      losses: the number of times that a client lost its arrays, and began again.
      wrong: the number of values that were wrong.
    """

    seed: int
    seconds: float
    kills: int
    sums: list[int]
    losses: list[int]
    wrong: list[int]


class ReadsRun(FaultRun, frozen=True, kw_only=True, tag="reads"):
    """One run of `test_reads_under_faults`. The lists have an element per client.

    Attributes:
      is_remote: whether the clients share no memory with the hosts, as on different machines.
      seconds: the duration of the run.
      kills: the number of killed workers.
      done: the number of operations that returned.
      lost: the number of operations that failed with the error of a lost worker.
      wrong: descriptions of wrong values, of all clients.
      pending: the number of reads and writes that never ended.
    """

    is_remote: bool
    seconds: float
    kills: int
    done: list[int]
    lost: list[int]
    wrong: list[str]
    pending: list[int]


Run = TypeVar("Run", bound=FaultRun)


class Kind(Generic[Run]):
    """The committed results of one test."""

    def __init__(self, run_type: type[Run], name: str) -> None:
        self.run_type = run_type
        self.path = RESULTS / name

    def read(self) -> list[Run]:
        if not self.path.exists():
            return []
        return [msgspec.convert(each, self.run_type) for each in msgspec.json.decode(self.path.read_bytes())]

    def write(self, runs: Sequence[FaultRun]) -> None:
        self.path.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")


PUBLISHING = Kind(PublishingRun, "publishing-faults.json")
COLLECTIVES = Kind(CollectivesRun, "collectives-faults.json")
READS = Kind(ReadsRun, "reads-faults.json")
KINDS: tuple[Kind[Any], ...] = (PUBLISHING, COLLECTIVES, READS)


class Table(msgspec.Struct, frozen=True):
    """The table of a page."""

    page: Path
    begin: str
    end: str
    render: Callable[[], str]

    def write(self) -> None:
        write_between(self.page, self.begin, self.end, self.render())


def _lines(description: str, header: str, columns: dict[str, dict[str, float]]) -> str:
    """Return a Markdown table of columns that have the same rows."""
    lines = [description, "", f"| {header} | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for row in next(iter(columns.values())):
        lines.append(f"| {row} | {' | '.join(f'{each[row]:,}' for each in columns.values())} |")
    return "\n".join(lines)


def _describe(runs: Sequence[FaultRun]) -> str:
    commits = ", ".join(map(describe_commit, dict.fromkeys(each.commit for each in runs)))
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {commits}."


# ---- publishing

_SPILLS = {None: "on devices", "disk": 'with `spill="disk"`'}


def publishing_table(runs: Sequence[PublishingRun] | None = None) -> str:
    """Return the sum of the runs, by default of the committed ones, as a Markdown table."""
    runs = PUBLISHING.read() if runs is None else runs
    chosen = {name: [each for each in runs if each.spill == spill] for spill, name in _SPILLS.items()}
    return _lines(
        _describe(runs), "versions", {name: _publishing_column(each) for name, each in chosen.items() if each}
    )


def _publishing_column(runs: list[PublishingRun]) -> dict[str, float]:
    subscribers = [each for run in runs for each in run.subscribers]
    publisher, controller, readers = (sum(kills) for kills in zip(*[each.kills for each in runs], strict=True))
    return {
        "kills of the publisher": publisher,
        "kills of the controller": controller,
        "kills of an island of readers": readers,
        "kills of the island with the published arrays": sum(each.homes for each in runs),
        "versions that three readers have read": sum(each.versions for each in subscribers),
        "versions that were mixtures": sum(len(each.mixtures) for each in subscribers),
        "requests that failed": sum(sum(each.errors.values()) for each in subscribers),
        "the slowest request, s": max(each.slowest for each in subscribers),
        "differences that `atoll check` found after the runs": sum(len(each.differences) for each in runs),
    }


# ---- collectives and reads

_PLACES = {False: "reads and writes", True: "reads and writes over TLS"}


def workers_table(collectives: Sequence[CollectivesRun] | None = None, reads: Sequence[ReadsRun] | None = None) -> str:
    """Return the sums of the runs that kill workers, by default of the committed ones, as a Markdown table."""
    collectives = COLLECTIVES.read() if collectives is None else collectives
    reads = READS.read() if reads is None else reads
    columns: dict[str, dict[str, float]] = {}
    if collectives:
        columns["collectives across islands"] = {
            "duration, s": round(sum(each.seconds for each in collectives)),
            "workers killed": sum(each.kills for each in collectives),
            "operations that returned": sum(sum(each.sums) for each in collectives),
            "failures because of a lost worker": sum(sum(each.losses) for each in collectives),
            "wrong values": sum(sum(each.wrong) for each in collectives),
        }
    for is_remote, name in _PLACES.items():
        if runs := [each for each in reads if each.is_remote == is_remote]:
            columns[name] = {
                "duration, s": round(sum(each.seconds for each in runs)),
                "workers killed": sum(each.kills for each in runs),
                "operations that returned": sum(sum(each.done) for each in runs),
                "failures because of a lost worker": sum(sum(each.lost) for each in runs),
                "wrong values": sum(len(each.wrong) for each in runs),
            }
    return _lines(_describe([*collectives, *reads]), "while workers are killed", columns)


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin (written by benchmarks.fault_runs) -->", f"<!-- {name}: end -->"


TABLES = (
    Table(DESIGN / "named-arrays.md", *_markers("faults"), publishing_table),
    Table(DESIGN / "recovery-times.md", *_markers("killed workers"), workers_table),
)


def keep(results: Path) -> None:
    """Replace the committed results of each test that appended to a file by those in the file."""
    decoder = msgspec.json.Decoder(PublishingRun | CollectivesRun | ReadsRun)
    runs = [decoder.decode(line) for line in results.read_bytes().splitlines()]
    for kind in KINDS:
        if found := [each for each in runs if isinstance(each, kind.run_type)]:
            kind.write(found)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
    for table in TABLES:
        table.write()
