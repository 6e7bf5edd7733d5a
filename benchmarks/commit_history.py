"""The history of metrics: commits measured in turn in one run, and runs linked by commits that they share.

`python -m benchmarks compare --keep` appends a run to `benchmarks/results/history.json`.
`python -m benchmarks.commit_history` writes the table of docs/design/waits.md from that file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.harness.backends import ROOT
from benchmarks.harness.pages import write_between
from benchmarks.harness.record import RESULTS
from benchmarks.harness.statistics import Summary, number

HISTORY = RESULTS / "history.json"
PAGE = ROOT / "docs" / "design" / "waits.md"
BEGIN, END = "<!-- history: begin (written by benchmarks.commit_history) -->", "<!-- history: end -->"


class Commit(msgspec.Struct, frozen=True):
    """A commit that was measured, with the day on which it was made (ISO 8601)."""

    commit: str
    day: str


class Row(msgspec.Struct, frozen=True):
    """A metric of a benchmark: one summary per commit of the run, None for a commit that could not be measured."""

    key: str
    name: str
    title: str
    unit: str
    summaries: list[Summary | None]


class Run(msgspec.Struct, frozen=True):
    """Commits that were measured in turn in one run, the oldest first."""

    commits: list[Commit]
    started: str
    rounds: int
    machine: str
    python: str
    jax: str
    busy: bool
    rows: list[Row]


@dataclass(frozen=True)
class Series:
    """A metric over all commits of the history, as it would be on the machine of the latest run.

    `values` has one number per commit of `commits`, None where the metric was not measured.
    """

    title: str
    unit: str
    values: list[float | None]


def read(path: Path = HISTORY) -> list[Run]:
    """Return the runs that were kept, in the order in which they were measured."""
    return msgspec.json.decode(path.read_bytes(), type=list[Run]) if path.exists() else []


def check_continues(former: Sequence[Run], commits: Sequence[Commit]) -> None:
    """Raise ValueError if a run of these commits does not begin with the last commit of the former runs."""
    if former and former[-1].commits[-1] != commits[0]:
        raise ValueError(
            f"the run begins with {commits[0].commit[:9]}: begin with the last commit of the history, "
            f"{former[-1].commits[-1].commit[:9]}"
        )


def append(run: Run, path: Path = HISTORY) -> None:
    """Add a run to the file. Raises ValueError if it does not begin with the last commit of the file."""
    former = read(path)
    check_continues(former, run.commits)
    path.write_bytes(msgspec.json.format(msgspec.json.encode([*former, run]), indent=1) + b"\n")


def commits(runs: Sequence[Run]) -> list[Commit]:
    """Return all commits, the oldest first, the shared ones once."""
    return [each for i, run in enumerate(runs) for each in run.commits[1 if i else 0 :]]


def series(runs: Sequence[Run]) -> list[Series]:
    """Return the metrics of the latest run over all commits.

    The speed of a machine changes from run to run. So each older run is scaled: its last commit, which is the first
    of the next run, keeps the value that the next run measured.
    """
    found = []
    for row in runs[-1].rows:
        values = [None if each is None else each.median for each in row.summaries]
        for run in reversed(runs[:-1]):
            older = next((each for each in run.rows if (each.key, each.name) == (row.key, row.name)), None)
            last = older.summaries[-1] if older else None
            first = values[0]
            if older is None or last is None or first is None:
                values[:0] = [None] * (len(run.commits) - 1)
                continue
            scale = first / last.median
            values[:0] = [None if each is None else each.median * scale for each in older.summaries[:-1]]
        found.append(Series(row.title, row.unit, values))
    return found


def waits(runs: Sequence[Run]) -> list[Series]:
    """Return the metrics that are times for which a script waits, without the CPU times beside them."""
    return [each for each in series(runs) if "CPU time" not in each.title]


def render(runs: Sequence[Run]) -> str:
    """Return the history as a Markdown table: one row per metric, one column per commit."""
    last, names = runs[-1], commits(runs)
    lines = [
        f"Commits measured in turn, {last.rounds} rounds, on {last.started[:10]}; {last.machine}, Python "
        f"{last.python}, jax {last.jax}. Medians. Speed: the last commit relative to the first.",
        "",
        "| | unit | " + " | ".join(f"{each.commit[:9]}, {each.day}" for each in names) + " | speed |",
        "|---|---|" + "---:|" * (len(names) + 1),
    ]
    for each in waits(runs):
        cells = ["" if value is None else number(value) for value in each.values]
        first, now = each.values[0], each.values[-1]
        speed = "" if first is None or now is None else number(first / now)
        lines.append(f"| {each.title} | {each.unit} | {' | '.join(cells)} | {speed} |")
    return "\n".join(lines)


def main() -> None:
    write_between(PAGE, BEGIN, END, render(read()))


if __name__ == "__main__":
    main()
