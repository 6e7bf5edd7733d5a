"""Pictures of a schedule: as text, which needs nothing, and with matplotlib."""

from __future__ import annotations

from typing import Any

from atoll.errors import PipelineError
from atoll.pipelines.schedule import DEFAULT_TIMES, Entry, Kind, Schedule, Times

_COLOURS = {Kind.FORWARD: "#8fb4e3", Kind.BACKWARD: "#9bd0a1", Kind.INPUT: "#9bd0a1", Kind.WEIGHTS: "#f0c48a"}


def text(schedule: Schedule, times: Times = DEFAULT_TIMES) -> str:
    """A line a stage and a column a unit of time; a dot is an idle one. With the head: bubble and activations held."""
    check = schedule.check(times)
    several = schedule.parts > schedule.stages
    width = 1 + max(len(_name(entry, several)) for entry in check.spans)
    lines = [
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches, "
        f"bubble {100 * check.bubble:.1f} %, at most {max(check.held)} activations held"
    ]
    for stage, row in enumerate(schedule.rows):
        cells = ["."] * round(check.length)
        for entry in row:
            start, end = check.spans[entry]
            for column in range(round(start), round(end)):
                cells[column] = _name(entry, several) if column == round(start) else "="
        lines.append(f"{stage:>3} " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def plot(schedule: Schedule, times: Times = DEFAULT_TIMES, ax: Any = None) -> Any:
    """Draws the table on matplotlib's axes, and returns them. Raises PipelineError where matplotlib is missing."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise PipelineError(
            "plot() needs matplotlib: pip install 'atoll[plot]'; print(schedule) draws the table as text"
        ) from None
    check = schedule.check(times)
    several = schedule.parts > schedule.stages
    if ax is None:
        _, ax = plt.subplots(figsize=(max(6.0, 0.28 * check.length), 0.8 + 0.4 * schedule.stages))
    for stage, row in enumerate(schedule.rows):
        for entry in row:
            start, end = check.spans[entry]
            ax.barh(stage, end - start, left=start, color=_COLOURS[entry.kind], edgecolor="white")
            ax.text((start + end) / 2, stage, _name(entry, several), ha="center", va="center", fontsize=7)
    ax.set_yticks(range(schedule.stages), [f"stage {stage}" for stage in range(schedule.stages)])
    ax.invert_yaxis()
    ax.set_xlabel("time")
    ax.set_title(f"{schedule.name}: bubble {100 * check.bubble:.1f} %")
    return ax


def _name(entry: Entry, several: bool) -> str:
    """The part is left out where the stage says it."""
    return str(entry) if several else f"{entry.kind}{entry.microbatch}"
