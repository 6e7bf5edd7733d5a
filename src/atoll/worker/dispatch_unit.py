"""A run of a plan on this host, and the units in which the controller dispatches its segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atoll.errors import Status
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.worker.completions import Completion
from atoll.worker.store import Buffer


@dataclass(slots=True)
class Read:
    """What a thread is to read and send off. `wait()` returns once it has been computed, and raises what went wrong.

    `at_once()` tells whether neither would block.
    """

    wait: Callable[[], object]
    read: Callable[[], None]
    at_once: Callable[[], bool]


@dataclass(slots=True)
class PlanRun:
    """One run of a plan. `segments` counts those that have been dispatched."""

    run: m.Run
    plan: p.Plan
    segments: int = 0
    failure: Status | None = None
    values: dict[int, Buffer] | None = None  # from its first step on


@dataclass(slots=True, eq=False)
class DispatchUnit:
    """Segments of a run that are dispatched together, from `segment` up to `stop`; and how far it has come.

    `completions` are those of what it has enqueued; `reads` what threads are yet to read for it.
    """

    plan_run: PlanRun
    segment: int
    stop: int
    sequence: int
    place: int  # of a collective, among all that have come; 0 for what is none
    position: int = 0  # among the segment's steps
    started: int = 0  # in nanoseconds
    completions: list[Completion] = field(default_factory=list)
    futures: int = 0  # calls of Python on whose outcome it waits
    reads: list[Read] = field(default_factory=list)
    aside: bool = False  # others of its session go on, and its results are expected
    callbacks: Sequence[Callbacks] = ()  # of the functions that it runs
    is_watched: bool = False  # it ends when its completions do, and who reports that knows no rows
    rows: list[tuple[int, int]] = field(default_factory=list)  # bytes of them, not reported yet: (sent, received)

    def take_rows(self) -> tuple[m.RowsMoved, ...]:
        """What is to be reported of rows ahead of its end. Any thread."""
        found = []
        while self.rows:
            found.append(self.rows.pop())
        return (m.RowsMoved(self.sequence, *map(sum, zip(*found, strict=True))),) if found else ()

    @property
    def only_receives(self) -> bool:
        """Whether it is all of its plan on this host, and does nothing but put together what other hosts send."""
        segments = self.plan_run.plan.segments
        return (
            self.sequence == self.plan_run.run.sequence
            and self.stop == len(segments)
            and not self.place
            and all(type(step) is p.Receive for segment in segments for step in segment.steps)
        )
