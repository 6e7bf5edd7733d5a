"""The table of CPU time by process on its page, from the result of `benchmarks.micro.cpu_time`.

python -m benchmarks.micro.cpu_time_page
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness.backends import ROOT
from benchmarks.harness.pages import write_between
from benchmarks.harness.provenance import describe_commit
from benchmarks.harness.record import RESULTS

RESULT = RESULTS / "cpu-time.json"
PAGE = ROOT / "docs" / "design" / "performance.md"
BEGIN, END = "<!-- cpu time: begin (written by benchmarks.micro.cpu_time_page) -->", "<!-- cpu time: end -->"
_PROCESSES = ("script", "proxy", "controller", "worker")
_TITLES = {
    "b": {"atoll": "Atoll, op by op (b)", "stock": "stock JAX, op by op (b)"},
    "j": {"atoll": "Atoll, 128 nodes in a program (j)"},
    "fig5": {
        "Atoll, op by op": "Atoll, 4 hosts, op by op (fig5)",
        "Atoll, chained": "Atoll, 4 hosts, chained (fig5)",
        "JAX, op by op": "multi-controller JAX, 4 hosts, op by op (fig5)",
    },
}


def render(source: Path = RESULT) -> str:
    """Return the Markdown table of a result."""
    record = msgspec.json.decode(source.read_bytes())
    lines = [
        f"{describe_commit(record['commit']).capitalize()}, load {record['load_before']:.1f} before the run. "
        "Microseconds of CPU time per computation.",
        "",
        "| | script | proxy | controller | workers | all | cores busy | computations/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *(_row(each) for each in record["results"])])


def _row(result: Any) -> str:
    backend, _, threads = result["backend"].partition(" (")
    title = _TITLES[result["benchmark"]][backend]
    if threads:
        title = f"{title.removesuffix(')')}, {threads}"
    times = [f"{time:,.1f}" if (time := result["microseconds"].get(name)) else "" for name in _PROCESSES]
    cells = [title, *times, f"{result['all']:,.1f}", f"{result['cores_busy']:.2f}", f"{result['rate']:,}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    write_between(PAGE, BEGIN, END, render())


if __name__ == "__main__":
    main()
