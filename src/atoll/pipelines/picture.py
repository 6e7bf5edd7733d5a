"""Pictures of a schedule: as text, which needs nothing, and with matplotlib; and of what really ran of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from atoll.errors import PipelineError
from atoll.pipelines.entries import Check, Entry, Kind
from atoll.pipelines.pipeline_run import Ran, bars, idle

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
    several = _several(rows)
    ax = ax or _axes(rows, check.length)
    for stage, row in enumerate(rows):
        for entry in row:
            _bar(ax, stage, (entry,), *check.spans[entry], several)
    _label(ax, rows, f"{name}: bubble {100 * check.bubble:.1f} %", "time")
    return ax


def plot_run(name: str, rows: Rows, spans: Iterable[Ran], ax: Any = None) -> Any:
    """What the spans of a trace say that ran of a step, in the same colours."""
    ran = bars(rows, spans)
    several = _several(rows)
    ax = ax or _axes(rows, 2.0 * max(map(len, rows)))
    origin = min(bar.start for bar in ran)
    for bar in ran:
        _bar(ax, bar.stage, bar.entries, (bar.start - origin) / 1e6, (bar.end - origin) / 1e6, several)
    _label(ax, rows, f"{name}, as it ran: stages idle for {100 * idle(ran):.1f} %", "ms")
    return ax


def _axes(rows: Rows, length: float) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise PipelineError(
            "a plot needs matplotlib: pip install 'atoll[plot]'; print(schedule) draws the table as text"
        ) from None
    _, ax = plt.subplots(figsize=(max(6.0, 0.28 * length), 0.8 + 0.4 * len(rows)))
    return ax


def _bar(ax: Any, stage: int, entries: Sequence[Entry], start: float, end: float, several: bool) -> None:
    label = " ".join([_name(entry, several) for entry in entries])
    ax.barh(stage, end - start, left=start, color=_COLOURS[entries[-1].kind], edgecolor="white")
    ax.text((start + end) / 2, stage, label, ha="center", va="center", fontsize=7)


def _label(ax: Any, rows: Rows, title: str, unit: str) -> None:
    ax.set_yticks(range(len(rows)), [f"stage {stage}" for stage in range(len(rows))])
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.set_title(title)


def _several(rows: Rows) -> bool:
    return len({entry.part for row in rows for entry in row}) > len(rows)


def _name(entry: Entry, several: bool) -> str:
    """The part is left out where the stage says it."""
    return str(entry) if several else f"{entry.kind}{entry.microbatch}"
