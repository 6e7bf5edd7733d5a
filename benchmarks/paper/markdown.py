"""docs/project/benchmarks.md, from what is in benchmarks/results/: nothing in it is typed in by hand.

The numbers are those of the records. The titles are those that the code has now.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import result_list
from benchmarks.harness.provenance import describe_commit
from benchmarks.harness.record import Claim, RunRecord
from benchmarks.harness.titles import retitled
from benchmarks.micro.report import quiet
from benchmarks.paper.costs import FILE, costs_of, read_costs, rows
from benchmarks.paper.figure import Figure, Options, count_of
from benchmarks.paper.table import cells, last_words, words

_HEAD = """# Benchmarks: the paper's measurements, and ours

`python -m benchmarks report` writes this page from `benchmarks/results/`. Each number is the median of the rounds of
one run, in which all contestants took turns on the same devices; the quartiles are in brackets. `python -m benchmarks
FIGURE` repeats a measurement. Each result names its commit. Results are not measured again at each change, so most of
them are older than the code: `git log --oneline COMMIT.. -- src/atoll benchmarks` lists what has changed since.
[A list](#machine-and-versions-of-each-result) has the date, the machine and the versions of each result, also of those
that other pages show.

Real devices are JAX's CPU devices. *Null* devices take a given time and compute nothing, with the real controller,
scheduler, messages and worker code ([how it works](../design/index.md)). They show the cost of the control plane at
sizes for which no hardware was available. [Performance](../design/performance.md) explains where the time goes.

Atoll's workers start the threads of CPU devices as [batch threads](../design/performance.md#batch-threads), which
preempt no other thread. JAX with *(batch threads)* is started in the same way (`chrt --batch 0 python ...`), and the
claims compare with it. JAX as users start it is shown beside it. All other peers are as users start them.
"""

_COSTS = """## Costs in virtual time

table1, table2, fig10, pipelines and two-islands on null devices are computed: the real controller, hosts and clients
exchange their messages in one process, and a virtual clock adds the cost of each message. The costs are measured with
real processes (`python -m benchmarks costs`), and the figures follow from them. The devices, and the networks between
them, are those of a model (`tpu-v3`). Between islands, a transfer is copied to host memory, sent at most at the rate of
this machine's data path, and copied to the device. That data path connects processes of one machine, and control
messages use its loopback.
"""


def render(
    figures: Sequence[Figure],
    runs: Mapping[str, RunRecord],
    pictures: Mapping[str, str],
    costs: RunRecord | None = None,
    listed: str = "",
) -> str:
    """Return the page, with `listed`, the list of all results, at its end.

    `runs` and `pictures` (their paths as seen from the page) are by name: a figure's key, or with -null.
    """
    parts = [_HEAD]
    if costs is not None:
        lines = [_origin(costs), "", "| | costs |", "|---|---:|"]
        lines += [f"| {what} | {how_much} |" for what, how_much in rows(costs_of(costs))]
        parts.append(_COSTS + "\n" + "\n".join(lines) + "\n")
    current = {} if costs is None else msgspec.to_builtins(costs_of(costs))
    for figure in figures:
        parts.append(f"## {figure.key}: {figure.title}\n\n{figure.explanation}\n\n*The paper:* {figure.paper}\n")
        for name, what in ((figure.key, "Real devices"), (f"{figure.key}-null", "Null devices")):
            if name in runs:
                null = name.endswith("-null")
                parts.append(_section(with_current_titles(runs[name], figure, null), what, pictures.get(name, "")))
                if figure.virtual and null and not same_costs(runs[name].costs, current):
                    parts.append("It was computed with other costs than those above.\n")
    return "\n".join([*parts, *([listed] if listed else [])])


def same_costs(recorded: Mapping[str, float], current: Mapping[str, float]) -> bool:
    """Return whether all costs that a record has are the current ones. Costs that were added later do not count."""
    return bool(recorded) and all(math.isclose(cost, current.get(name, -1.0)) for name, cost in recorded.items())


def with_current_titles(run: RunRecord, figure: Figure, null: bool) -> RunRecord:
    """Return a record with the titles and the texts of claims that the code of the figure has now."""
    options = Options(null=null)
    benchmarks = retitled(run.benchmarks, figure.points(options))
    claims = list(figure.claims(benchmarks, options)) if run.claims else []
    same = [_judged(claim) for claim in claims] == [_judged(claim) for claim in run.claims]
    return msgspec.structs.replace(run, benchmarks=benchmarks, claims=claims if same else run.claims)


def _judged(claim: Claim) -> tuple[float | None, float, bool | None]:
    """Return what a claim says, except for its text. JSON has no infinity."""
    return None if claim.value == math.inf else claim.value, claim.bound, claim.reached


def _origin(run: RunRecord) -> str:
    """By which command, when, of which code and on which machine it was measured."""
    machine = run.machine
    parts = [
        f"`{' '.join(run.command)}`, {run.started[:10]}, {describe_commit(machine.commit)}, "
        f"{count_of(run.rounds, 'round')}, "
        f"{quiet(run)}; {machine}.",
        "The machine was busy: these numbers do not count." if run.busy else "",
    ]
    return " ".join(part for part in parts if part)


def _section(run: RunRecord, what: str, picture: str) -> str:
    lines = [f"### {what}", "", _origin(run), ""]
    if picture:
        lines += [f"![{run.name}]({picture})", ""]
    header, *rows = cells(run)
    lines += ["| " + " | ".join(header) + " |", "|---|---|" + "---:|" * (len(header) - 2)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    if run.claims:
        lines += ["", "| claim | measured | target | met |", "|---|---:|---|---|"]
        lines += [f"| {claim.text} | {' | '.join(words(claim, not run.busy))} |" for claim in run.claims]
    for point in run.benchmarks:
        for name, error in point.failures.items():
            lines += ["", f"{point.title}, {name}, failed: {last_words(error)}"]
    return "\n".join(lines) + "\n"


def write_page(figures: Sequence[Figure], results: Path, page: Path) -> list[str]:
    """Writes the page; the names of what it shows."""
    names = [name for figure in figures for name in (figure.key, f"{figure.key}-null")]
    runs = {
        name: msgspec.json.decode((results / f"{name}.json").read_bytes(), type=RunRecord)
        for name in names
        if (results / f"{name}.json").exists()
    }
    pictures = {
        name: os.path.relpath(results / f"{name}.png", page.parent)
        for name in runs
        if (results / f"{name}.png").exists()
    }
    costs = read_costs(results) if (results / FILE).exists() else None
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(figures, runs, pictures, costs, result_list.render(results)))
    return list(runs)
