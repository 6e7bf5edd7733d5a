"""Pictures of a schedule and of a recorded run of it: as text, or with matplotlib."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from atoll.errors import PipelineError
from atoll.pipelines.entries import Check, Entry, Kind
from atoll.quantities import counted

_COLOURS = {Kind.FORWARD: "#8fb4e3", Kind.BACKWARD: "#9bd0a1", Kind.INPUT: "#9bd0a1", Kind.WEIGHTS: "#f0c48a"}
# Kinds of entries by the names of the functions in `pipelines.parts`. One function may run both entries of the last
# part and a micro-batch.
_KINDS: Mapping[str, tuple[Kind, ...]] = {
    "forward_backward": (Kind.FORWARD, Kind.BACKWARD),
    "forward": (Kind.FORWARD,),
    "backward_inputs": (Kind.INPUT,),
    "backward_weights": (Kind.WEIGHTS,),
    "backward": (Kind.BACKWARD,),
}
_FUNCTION = re.compile(rf"part_(\d+)_({'|'.join(_KINDS)})(?: x(\d+))?")

Rows = Sequence[Sequence[Entry]]


class RecordedSpan(Protocol):
    """The attributes of a span of `atoll.trace` that this module reads."""

    @property
    def island(self) -> int: ...
    @property
    def host(self) -> int: ...
    @property
    def started(self) -> int: ...
    @property
    def ended(self) -> int: ...
    @property
    def function(self) -> str: ...


class Bar(NamedTuple):
    """Entries, usually one, that a stage computed from `start` to `end`, in nanoseconds."""

    stage: int
    entries: tuple[Entry, ...]
    start: int
    end: int


def text(name: str, rows: Rows, check: Check) -> str:
    """Draw one line per stage and one column per unit of time; a dot is an idle unit.

    The first line gives the bubble and the maximum number of activations that a stage holds.
    """
    several = _several(rows)
    width = 1 + max(len(_name(entry, several)) for entry in check.spans)
    microbatches = 1 + max(entry.microbatch for entry in check.spans)
    lines = [
        f"{name}: {counted(len(rows), 'stage')}, {counted(microbatches, 'micro-batch')}, "
        f"bubble {100 * check.bubble:.1f} %, at most {counted(max(check.held), 'activation')} held"
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


def plot_run(name: str, rows: Rows, spans: Iterable[RecordedSpan], ax: Any = None) -> Any:
    """Draw the run of one step from the spans of a trace, in the same style as `plot`."""
    ran = bars(rows, spans)
    several = _several(rows)
    ax = ax or _axes(rows, 2.0 * max(map(len, rows)))
    origin = min(bar.start for bar in ran)
    for bar in ran:
        _bar(ax, bar.stage, bar.entries, (bar.start - origin) / 1e6, (bar.end - origin) / 1e6, several)
    _label(ax, rows, f"{name}, as it ran: stages idle for {100 * idle(ran):.1f} %", "ms")
    return ax


def bars(rows: Sequence[Sequence[Entry]], spans: Iterable[RecordedSpan]) -> list[Bar]:
    """Return the bars of the first step that the spans contain, in the first replica.

    Matches the runs of a part's functions with the table's entries in order. Raises PipelineError if no span matches.
    """
    stage_of = {entry.part: stage for stage, row in enumerate(rows) for entry in row}
    left: dict[tuple[int, Kind], deque[Entry]] = defaultdict(deque)
    for row in rows:
        for entry in row:
            left[entry.part, entry.kind].append(entry)
    where: dict[int, tuple[int, int]] = {}  # the island and host that represent each stage
    found: list[Bar] = []
    for span in sorted(spans, key=lambda each: (each.started, each.island, each.host)):
        ran = [
            (int(part), kind)
            for part, what, count in _FUNCTION.findall(span.function)
            for kind in _KINDS[what] * int(count or 1)
        ]
        stages = {stage_of[part] for part, _ in ran if part in stage_of}
        if len(stages) != 1:
            continue
        (stage,) = stages
        if where.setdefault(stage, (span.island, span.host)) != (span.island, span.host):
            continue
        entries = tuple([left[each].popleft() for each in ran if left[each]])
        if entries:
            found.append(Bar(stage, entries, span.started, span.ended))
    if not found:
        raise PipelineError(
            "the spans contain no step of a pipeline with this table: record them using `with atoll.trace() as spans:` "
            "around one call of pipe.step()"
        )
    return found


def idle(found: Sequence[Bar]) -> float:
    """Return the fraction of the stages' time between the first and the last bar in which they were idle."""
    length = max(bar.end for bar in found) - min(bar.start for bar in found)
    stages = {bar.stage for bar in found}
    return 1 - sum(bar.end - bar.start for bar in found) / (length * len(stages))


def _axes(rows: Rows, length: float) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise PipelineError(
            "plotting requires matplotlib: pip install 'atoll[plot]'. print(schedule) draws the table as text"
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
    """Return the entry's text, without the part if each stage has only one."""
    return str(entry) if several else f"{entry.kind}{entry.microbatch}"
