"""The list of all committed results: when, on which machine and with which versions each one was measured.

`python -m benchmarks report` writes it to docs/project/benchmarks.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness.backends import ROOT
from benchmarks.harness.provenance import DIRTY
from benchmarks.harness.record import RESULTS

HEADING = "## Machine and versions of each result"
FIGURES = "docs/project/benchmarks.md"
# Pages that show a result or the results of a directory. FIGURES shows the others.
PAGES = {
    "choices": "docs/design/data-dependent.md",
    "collectives-faults": "docs/design/recovery-times.md",
    "conformance": "docs/project/conformance.md",
    "cpu-time": "docs/design/performance.md",
    "earlier-version": "docs/design/performance.md",
    "elastic": "docs/design/recovery-times.md",
    "exchange": "docs/design/named-arrays.md",
    "floor": "docs/design/waits.md",
    "gpu": "docs/guides/gpus.md",
    "grpo": "docs/design/named-arrays.md",
    "history": "docs/design/waits.md",
    "islands": "docs/design/computations-over-islands.md",
    "journal": "docs/design/journal.md",
    "journaled": "docs/design/journal.md",
    "machines": "docs/design/data-plane.md",
    "micro": "docs/design/performance.md",
    "mpmd": "docs/design/front-end.md",
    "named-arrays": "docs/design/named-arrays.md",
    "publishing-faults": "docs/design/named-arrays.md",
    "reads-faults": "docs/design/recovery-times.md",
    "recoveries": "docs/design/recovery-times.md",
    "routing": "docs/design/sparse-exchange.md",
    "static-runs": "docs/design/scheduling.md",
    "subscribers": "docs/design/named-arrays.md",
    "suspension": "docs/design/suspending.md",
    "tree-moves": "docs/design/jax-patches.md",
    "waits": "docs/design/waits.md",
}
_TEXT = """If a cell is empty, the result does not record it. `+` after a commit stands for changes that were not
committed. Results with `busy` do not count."""


def result_names(results: Path = RESULTS) -> list[str]:
    """Return the names of the results in a directory, without those that git ignores."""
    names = [path.relative_to(results).with_suffix("").as_posix() for path in results.rglob("*.json")]
    return sorted(name for name in names if not name.startswith(("local/", "quick/")))


def page_of(name: str) -> str:
    """Return the page that shows a result, from the repository's root."""
    return PAGES.get(name, PAGES.get(name.partition("/")[0], FIGURES))


def render(results: Path = RESULTS) -> str:
    """Return the section of the page of figures with a row for each result."""
    lines = [HEADING, "", _TEXT, ""]
    lines += ["| result | date | machine | Python | JAX | commit | |", "|---|---|---|---|---|---|---|"]
    for name in result_names(results):
        shown = ROOT / page_of(name)
        target = "" if shown == ROOT / FIGURES else os.path.relpath(shown, (ROOT / FIGURES).parent)
        title = f"[`{name}`]({target})" if target else f"`{name}`"
        record = msgspec.json.decode((results / f"{name}.json").read_bytes())
        lines.append(f"| {' | '.join((title, *_cells(record)))} |")
    return "\n".join(lines) + "\n"


def _cells(record: Any) -> Sequence[str]:
    """Return the day, the machine, the versions of Python and JAX, the commit, and whether the machine was busy."""
    if isinstance(record, list):  # several runs: the latest one
        *_, record = record
    machine = record.get("machine") or {}
    if not isinstance(machine, Mapping):  # of a history
        machine = {"cpu": machine, "python": record["python"], "packages": {"jax": record["jax"]}}
    packages = machine.get("packages", {})
    cpu = ", ".join(str(each) for each in (record.get("device"), machine.get("cpu")) if each)
    return (
        record.get("started", "")[:10],
        f"{cpu}, {machine['cores']} cores" if "cores" in machine else cpu,
        machine.get("python") or record.get("python", ""),
        packages.get("jax") or record.get("jax", ""),
        _commit(machine.get("commit") or record.get("commit") or _last_commit(record)),
        "busy" if record.get("busy") else "",
    )


def _last_commit(record: Mapping[str, Any]) -> str:
    """Return the newest of the commits that a run has compared."""
    return record["commits"][-1]["commit"] if record.get("commits") else ""


def _commit(commit: str) -> str:
    return commit[:9] + (DIRTY if commit.endswith(DIRTY) else "")
