"""Runs of plans on this host, and the units in which the controller dispatches their segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from atoll.errors import Status
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.worker.completions import Completion
from atoll.worker.grouped_sends import SendGroup
from atoll.worker.store import Buffer


class Read(msgspec.Struct):
    """A result that a thread has to read and send."""

    wait: Callable[[], object]  # returns once the result is computed, or raises the error
    read: Callable[[], None]  # reads and sends the result
    read_nowait: Callable[[], bool]  # does the same and returns True, or returns False if one of the two would block
    group: SendGroup | None = None  # the arrays that it sends to other hosts


class PlanRun(msgspec.Struct, eq=False):
    """One run of a plan."""

    run: m.Run
    plan: p.Plan
    segments: int = 0  # that have been dispatched
    failure: Status | None = None
    values: dict[int, Buffer] | None = None  # None until the first step


class DispatchUnit(msgspec.Struct, eq=False):
    """Segments of a run that are dispatched together, and their progress."""

    plan_run: PlanRun
    segment: int  # the next one to run
    stop: int  # the end of its segments
    sequence: int
    collective_index: int  # index of a collective among all that have arrived; 0 if the unit has none
    position: int = 0  # of the next step in its segment
    started: int = 0  # in nanoseconds
    completions: list[Completion] = msgspec.field(default_factory=list)  # of what it has enqueued
    futures: int = 0  # calls of Python whose outcome it awaits
    reads: list[Read] = msgspec.field(default_factory=list)  # that no thread has started
    in_background: bool = False  # it waits for input while its session continues; the store expects its results
    callbacks: Sequence[Callbacks] = ()  # of the functions that it runs
    arrived: int = 0  # position in its segment before which all input of other hosts has arrived
    is_watched: bool = False  # a watcher, which does not report rows, reports its end
    rows: list[tuple[int, int]] = msgspec.field(default_factory=list)  # bytes (sent, received) to report

    def take_rows(self) -> tuple[m.RowsMoved, ...]:
        """Remove and return the report about rows, which precedes the report of the end. Safe on any thread."""
        if not self.rows:  # nearly always
            return ()
        found = []
        with suppress(IndexError):  # all are taken, by this thread or another one
            while True:
                found.append(self.rows.pop())
        return (m.RowsMoved(self.sequence, *map(sum, zip(*found, strict=True))),) if found else ()

    @property
    def only_receives(self) -> bool:
        """Whether the unit is its whole plan on this host, and only assembles what other hosts send."""
        segments = self.plan_run.plan.segments
        return (
            self.sequence == self.plan_run.run.sequence
            and self.stop == len(segments)
            and not self.collective_index
            and all(type(step) is p.Receive for segment in segments for step in segment.steps)
        )
