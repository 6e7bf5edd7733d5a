"""docs/benchmarks.md, out of what is in benchmarks/results/: nothing in it is typed in by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.record import RunRecord
from benchmarks.micro.report import quiet
from benchmarks.paper.figure import Figure
from benchmarks.paper.table import cells, last_words, words

_HEAD = """# Benchmarks: the paper's measurements, and ours

Written by `python -m benchmarks report` from `benchmarks/results/`. A is the median of rounds, with its quartiles in
number is the median of rounds, with its quartiles in brackets,
of one run in which all contestants took turns on the same devices. `python -m benchmarks FIGURE` measures one again.

Real devices are JAX's CPU devices. *Null* devices take a given time and compute nothing, under the real controller,
scheduler, messages and worker code ([design.md](design.md)): they tell what the control plane costs at sizes that are
not at hand. [performance.md](performance.md) says where the time goes, and what real devices owe to how the system
schedules their threads (*Threads that wait their turn*): peers run as they come.
"""


def render(figures: Sequence[Figure], runs: Mapping[str, RunRecord], pictures: Mapping[str, str]) -> str:
    """The page. `runs` and `pictures` (their paths as seen from the page) by name: a figure's key, or with -null."""
    parts = [_HEAD]
    for figure in figures:
        parts.append(f"## {figure.key}: {figure.title}\n\n{figure.explanation}\n\n*The paper:* {figure.paper}\n")
        for name, what in ((figure.key, "Real devices"), (f"{figure.key}-null", "Null devices")):
            if name in runs:
                parts.append(_section(runs[name], what, pictures.get(name, "")))
    return "\n".join(parts)


def _section(run: RunRecord, what: str, picture: str) -> str:
    machine = run.machine
    busy = " The machine was busy: these numbers do not count." if run.busy else ""
    lines = [
        f"### {what}",
        "",
        f"`{' '.join(run.command)}`, {run.started[:10]}, {run.rounds} rounds, {quiet(run)}; "
        f"{machine.cpu}, {machine.cores} cores, Python {machine.python}, jax {machine.packages['jax']}.{busy}",
        "",
    ]
    if picture:
        lines += [f"![{run.name}]({picture})", ""]
    header, *rows = cells(run)
    lines += ["| " + " | ".join(header) + " |", "|---|---|" + "---:|" * (len(header) - 2)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    if run.claims:
        lines += ["", "| it must show | is | target | reached |", "|---|---:|---|---|"]
        lines += [f"| {claim.text} | {' | '.join(words(claim))} |" for claim in run.claims]
    for point in run.benchmarks:
        for name, error in point.failures.items():
            lines += ["", f"{point.title}, {name}, failed: {last_words(error)}"]
    return "\n".join(lines) + "\n"


def write_page(figures: Sequence[Figure], results: Path, page: Path) -> list[str]:
    """Writes the page; the names of what it shows."""
    import msgspec

    names = [name for figure in figures for name in (figure.key, f"{figure.key}-null")]
    runs = {
        name: msgspec.json.decode((results / f"{name}.json").read_bytes(), type=RunRecord)
        for name in names
        if (results / f"{name}.json").exists()
    }
    pictures = {name: f"../{results}/{name}.png" for name in runs if (results / f"{name}.png").exists()}
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(figures, runs, pictures))
    return list(runs)
