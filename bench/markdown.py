"""A result as a Markdown table, put between the markers of a page kept by hand.

python -m bench.markdown bench/results/NAME.json docs/performance.md
"""

import sys
from pathlib import Path

import msgspec

from bench.record import MetricRecord, RunRecord
from bench.report import number

BEGIN, END = "<!-- bench: begin (written by bench.markdown) -->", "<!-- bench: end -->"


def figure(metric: MetricRecord, backend: str) -> str:
    """Median and quartiles."""
    summary = metric.summaries.get(backend)
    return f"{number(summary.median)} ({number(summary.low)}-{number(summary.high)})" if summary else ""


def render(run: RunRecord) -> str:
    machine = run.machine
    lines = [
        f"{run.started[:10]}, {run.rounds} rounds, load {run.load_before:.2f} before the run; {machine.cpu}, "
        f"{machine.cores} cores, Python {machine.python}, jax {machine.packages['jax']}. Medians, quartiles in "
        "brackets.",
        "",
        "| | | unit | Atoll | stock JAX |",
        "|---|---|---|---:|---:|",
    ]
    for benchmark in run.benchmarks:
        for i, metric in enumerate(benchmark.metrics):
            key = benchmark.key if i == 0 else ""
            cells = f"{figure(metric, 'atoll')} | {figure(metric, 'stock')}"
            lines.append(f"| {key} | {metric.title} | {metric.unit} | {cells} |")
    return "\n".join(lines)


def main(source: str, page: str) -> None:
    text = Path(page).read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{page} lacks the markers {BEGIN} and {END}")
    table = render(msgspec.json.decode(Path(source).read_bytes(), type=RunRecord))
    Path(page).write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


if __name__ == "__main__":
    main(*sys.argv[1:])
