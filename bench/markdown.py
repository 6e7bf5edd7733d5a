"""A result as a Markdown table, put between the markers of a page kept by hand.

python -m bench.markdown bench/results/NAME.json docs/performance.md
"""

import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- bench: begin (written by bench.markdown) -->", "<!-- bench: end -->"


def figure(summary: dict[str, float] | None) -> str:
    """Median and quartiles, to three digits."""
    if not summary:
        return ""
    return f"{summary['median']:,.3g} ({summary['low']:,.3g}-{summary['high']:,.3g})"


def render(result: dict[str, Any]) -> str:
    lines = [
        f"{result['started'][:10]}, {result['rounds']} rounds, load {result['load_before']:.2f} before the run, "
        f"{machine(result['machine'])}. Medians, quartiles in brackets.",
        "",
        "| | | unit | Atoll | stock JAX |",
        "|---|---|---|---:|---:|",
    ]
    for benchmark in result["benchmarks"]:
        for i, metric in enumerate(benchmark["metrics"]):
            sums = metric["summaries"]
            key = benchmark["key"] if i == 0 else ""
            lines.append(
                f"| {key} | {metric['title']} | {metric['unit']} | {figure(sums.get('atoll'))} "
                f"| {figure(sums.get('stock'))} |"
            )
    return "\n".join(lines)


def machine(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, str | int | float))


def main(source: str, page: str) -> None:
    text = Path(page).read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{page} lacks the markers {BEGIN} and {END}")
    table = render(json.loads(Path(source).read_text()))
    Path(page).write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


if __name__ == "__main__":
    main(*sys.argv[1:])
