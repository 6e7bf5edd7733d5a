"""Pictures of a schedule: as text, which needs nothing, and with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.errors import PipelineError
from atoll.pipelines.entries import Check, Entry, Kind

_COLOURS = {Kind.FORWARD: "#8fb4e3", Kind.BACKWARD: "#9bd0a1", Kind.INPUT: "#9bd0a1", Kind.WEIGHTS: "#f0c48a"}

Rows = Sequence[Sequence[Entry]]


def text(name: str, rows: Rows, check: Check) -> str:
    """A line a stage and a column a unit of time; a dot is an idle one. The head has the bubble and what is held."""
    several = _several(rows)
    width = 1 + max(len(_name(entry, several)) for entry in check.spans)
    microbatches = 1 + max(entry.microbatch for entry in check.spans)
    lines = [
        f"{name}: {len(rows)} stages, {microbatches} micro-batches, bubble {100 * check.bubble:.1f} %, "
        f"at most {max(check.held)} activations held"
    ]
    for stage, row in enumerate(rows):
        cells = ["."] * round(check.length)
        for entry in row:
            start, end = check.spans[entry]
            for column in range(round(start), round(end)):
                cells[column] = _name(entry, several) if column == round(start) else "="
        lines.append(f"{stage:>3} " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def plot(name: str, rows: Rows, check: Check, ax: Any = None) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise PipelineError(
            "plot() needs matplotlib: pip install 'atoll[plot]'; print(schedule) draws the table as text"
        ) from None
    several = _several(rows)
    if ax is None:
        _, ax = plt.subplots(figsize=(max(6.0, 0.28 * check.length), 0.8 + 0.4 * len(rows)))
    for stage, row in enumerate(rows):
        for entry in row:
            start, end = check.spans[entry]
            ax.barh(stage, end - start, left=start, color=_COLOURS[entry.kind], edgecolor="white")
            ax.text((start + end) / 2, stage, _name(entry, several), ha="center", va="center", fontsize=7)
    ax.set_yticks(range(len(rows)), [f"stage {stage}" for stage in range(len(rows))])
    ax.invert_yaxis()
    ax.set_xlabel("time")
    ax.set_title(f"{name}: bubble {100 * check.bubble:.1f} %")
    return ax


def _several(rows: Rows) -> bool:
    return len({entry.part for row in rows for entry in row}) > len(rows)


def _name(entry: Entry, several: bool) -> str:
    """The part is left out where the stage says it."""
    return str(entry) if several else f"{entry.kind}{entry.microbatch}"
