"""The table of docs/design/performance.md with the speed of the code beside that of an earlier version.

python -m benchmarks compare --base REVISION --only KEYS --name earlier-version/micro
python -m benchmarks fig6 --null --results DIRECTORY   # here, and in a checkout of the earlier version
python -m benchmarks.comparison_page

The records of figures are kept as `earlier-version/FIGURE.json` and, of the earlier version, as
`earlier-version/FIGURE-earlier.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.compare import comparisons
from benchmarks.harness.backends import ROOT
from benchmarks.harness.benchmark import AT
from benchmarks.harness.pages import write_between
from benchmarks.harness.provenance import describe_commit
from benchmarks.harness.record import RESULTS, MetricRecord, RunRecord
from benchmarks.harness.statistics import Summary, number, with_quartiles
from benchmarks.harness.titles import retitled
from benchmarks.micro.report import quiet
from benchmarks.micro.table import BENCHMARKS

RESULT = RESULTS / "earlier-version"
MICRO, EARLIER = "micro.json", "-earlier.json"
PAGE = ROOT / "docs" / "design" / "performance.md"
BEGIN, END = "<!-- comparison: begin (written by benchmarks.comparison_page) -->", "<!-- comparison: end -->"
_CONTESTANT = "Atoll"  # of figures on null devices


def read(path: Path) -> RunRecord:
    return msgspec.json.decode(path.read_bytes(), type=RunRecord)


def render(results: Path = RESULT) -> str:
    """Return the Markdown table of the records in a directory."""
    micro = read(results / MICRO)
    machine, base = micro.machine, micro.benchmarks[0].contestants[-1].partition(AT)[2]
    lines = [
        f"{micro.started[:10]}, {describe_commit(machine.commit)} beside {describe_commit(base)}, {micro.rounds} "
        f"rounds in turn, {quiet(micro)}; {machine}. Medians, quartiles in brackets. The speed is that of this "
        "version over that of the earlier one: of micro-benchmarks in pairs of rounds, of figures that of the medians.",
        "",
        "| | | unit | earlier | this version | speed |",
        "|---|---|---|---:|---:|---:|",
    ]
    current = msgspec.structs.replace(micro, benchmarks=retitled(micro.benchmarks, BENCHMARKS))
    for each in comparisons(current):
        lines.append(_row(each.key, each.title, each.unit, each.bases[-1], each.here, with_quartiles(each.speed)))
    for path in sorted(results.glob(f"*{EARLIER}")):
        lines += _rows_of_figure(read(path), read(path.with_name(path.name.removesuffix(EARLIER) + ".json")))
    return "\n".join(lines)


def _rows_of_figure(earlier: RunRecord, now: RunRecord) -> Iterator[str]:
    before = {(point.title, metric.name): metric for point in earlier.benchmarks for metric in point.metrics}
    for point in now.benchmarks:
        for metric in point.metrics:
            former = before.get((point.title, metric.name))
            if former is not None:
                yield _row_of_point(now.name, f"{point.title}: {metric.title}", former, metric)


def _row_of_point(figure: str, title: str, former: MetricRecord, metric: MetricRecord) -> str:
    old, new = former.summaries.get(_CONTESTANT), metric.summaries.get(_CONTESTANT)
    speed = ""
    if old is not None and new is not None:
        speed = number(new.median / old.median if metric.unit.endswith("/s") else old.median / new.median)
    return _row(figure, title, metric.unit, old, new, speed)


def _row(key: str, title: str, unit: str, old: Summary | None, new: Summary | None, speed: str) -> str:
    cells = ["" if each is None else with_quartiles(each) for each in (old, new)]
    return f"| {key} | {title} | {unit} | {cells[0]} | {cells[1]} | {speed} |"


def main() -> None:
    write_between(PAGE, BEGIN, END, render())


if __name__ == "__main__":
    main()
