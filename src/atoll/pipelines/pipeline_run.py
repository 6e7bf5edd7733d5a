"""What really ran of a schedule, by the spans of a trace: to be laid beside the table. Pure."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from atoll.errors import PipelineError
from atoll.pipelines.entries import Entry, Kind

# How `pipelines.part_functions` names what entries compute; the last part may have both of an entry's halves in one.
_KINDS: Mapping[str, tuple[Kind, ...]] = {
    "forward_backward": (Kind.FORWARD, Kind.BACKWARD),
    "forward": (Kind.FORWARD,),
    "backward_inputs": (Kind.INPUT,),
    "backward_weights": (Kind.WEIGHTS,),
    "backward": (Kind.BACKWARD,),
}
_FUNCTION = re.compile(rf"part_(\d+)_({'|'.join(_KINDS)})(?: x(\d+))?")


class Ran(Protocol):
    """Of a span of `atoll.trace`, what is read here."""

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
    """What a stage computed at a time: entries, mostly one, from `start` to `end` in nanoseconds."""

    stage: int
    entries: tuple[Entry, ...]
    start: int
    end: int


def bars(rows: Sequence[Sequence[Entry]], spans: Iterable[Ran]) -> list[Bar]:
    """The first step of a pipeline with this table that is among the spans; of replicas, the first.

    What a stage ran of a part is in the table's order. Raises PipelineError where nothing of it is there.
    """
    stage_of = {entry.part: stage for stage, row in enumerate(rows) for entry in row}
    left: dict[tuple[int, Kind], deque[Entry]] = defaultdict(deque)
    for row in rows:
        for entry in row:
            left[entry.part, entry.kind].append(entry)
    where: dict[int, tuple[int, int]] = {}  # by stage: the island and host that are shown
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
            "these spans have nothing of a pipeline with this table: take them by `with atoll.trace() as spans:` "
            "around one call of pipe.step()"
        )
    return found


def idle(found: Sequence[Bar]) -> float:
    """The part of the time, from the first bar to the last, in which stages computed nothing."""
    length = max(bar.end for bar in found) - min(bar.start for bar in found)
    stages = {bar.stage for bar in found}
    return 1 - sum(bar.end - bar.start for bar in found) / (length * len(stages))
