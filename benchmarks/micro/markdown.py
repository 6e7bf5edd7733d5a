"""A result as a Markdown table, put between the markers of a page kept by hand.

python -m benchmarks.micro.markdown benchmarks/results/NAME.json docs/design/performance.md

A page may have further tables, each between markers with the name of its result.
"""

import sys
from collections.abc import Set
from pathlib import Path

import msgspec

from benchmarks.harness.pages import write_between
from benchmarks.harness.provenance import describe_commit
from benchmarks.harness.record import MetricRecord, RunRecord, ratio_to
from benchmarks.harness.statistics import Ratio, number, with_quartiles
from benchmarks.harness.titles import retitled
from benchmarks.micro.report import quiet
from benchmarks.micro.table import BENCHMARKS

# Results that have a page of their own: the table of all micro-benchmarks leaves them out, so a figure is on one page.
OWNERS = ("machines", "routing", "journaled", "static-runs", "waits", "islands", "mpmd", "tree-moves", "floor")
BEGIN, END = "<!-- bench: begin (written by benchmarks.micro.markdown) -->", "<!-- bench: end -->"
# Markers of a result by its name.
BEGIN_OF, END_OF = BEGIN.replace("bench:", "bench {}:"), END.replace("bench:", "bench {}:")


def figure(metric: MetricRecord, backend: str) -> str:
    """Median and quartiles."""
    summary = metric.summaries.get(backend)
    return with_quartiles(summary) if summary else ""


def quotient(ratio: Ratio | None) -> str:
    """Of two contestants' medians, with the quartiles of the ratios round by round."""
    return f"{number(ratio.of_medians)} ({number(ratio.low)}-{number(ratio.high)})" if ratio else ""


def read(source: Path) -> RunRecord:
    return msgspec.json.decode(source.read_bytes(), type=RunRecord)


def shown_elsewhere(source: Path) -> set[str]:
    """Return the keys of the benchmarks that other pages show, if `source` has the results of all."""
    if source.stem in OWNERS:
        return set()
    owners = [source.with_stem(name) for name in OWNERS]
    return {benchmark.key for owner in owners if owner.exists() for benchmark in read(owner).benchmarks}


def render(run: RunRecord, left_out: Set[str] = frozenset()) -> str:
    machine = run.machine
    lines = [
        f"{run.started[:10]}, {describe_commit(machine.commit)}, {run.rounds} rounds, {quiet(run)}; {machine}. "
        "Medians, quartiles in brackets. A ratio is that of the two medians. Its quartiles are those of the ratios of "
        "the rounds, so it may be outside of them.",
        "",
        "| | | unit | Atoll | peer | ratio | target |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for benchmark in retitled(run.benchmarks, BENCHMARKS):
        if benchmark.key in left_out:
            continue
        first, *peers = benchmark.contestants
        second, *others = peers or [""]  # some have no peer
        lines.append(f"| {benchmark.key} | **{benchmark.title}** | | {first} | {second} | | |")
        for metric in benchmark.metrics:
            cells = [figure(metric, first), figure(metric, second), quotient(metric.ratio), metric.target or ""]
            lines.append(f"| | {metric.title} | {metric.unit} | {' | '.join(cells)} |")
        for other in others:
            lines.append(f"| | *beside it* | | | {other} | | |")
            for metric in benchmark.metrics:
                against = quotient(ratio_to(metric, first, other))
                lines.append(f"| | {metric.title} | {metric.unit} | | {figure(metric, other)} | {against} | |")
    return "\n".join(lines)


def markers(page: Path, name: str) -> tuple[str, str]:
    """Return the markers of a result on a page: those with its name if the page has them."""
    begin, end = BEGIN_OF.format(name), END_OF.format(name)
    return (begin, end) if begin in page.read_text() else (BEGIN, END)


def main(source: str, page: str) -> None:
    result, target = Path(source), Path(page)
    write_between(target, *markers(target, result.stem), render(read(result), shown_elsewhere(result)))


if __name__ == "__main__":
    main(*sys.argv[1:])
