"""How dispatch units end: what they have enqueued is watched and read, and what came of it reported."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor as Pool
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from atoll.cluster.processes.bugs import start_in
from atoll.errors import Status
from atoll.host_services.calls.client_errors import status_of
from atoll.protocol import messages as m
from atoll.worker.completions import ReadCompletion, Watcher, are_complete, wait_for
from atoll.worker.dispatch_unit import DispatchUnit, Read
from atoll.worker.occupancy import Occupancy
from atoll.worker.step_runner import StepRunner

# As many as the controller lets wait for their clients on a host in XLA's threads (`dependencies.client_run_limits`).
MOST_CLIENT_ENDS = 8
# Sequence number, start and end in nanoseconds.
_Span = tuple[int, int, int]
_Item = TypeVar("_Item")


class CompletionReporter:
    """For the executor's thread. `occupancy` sends messages to the controller, from any thread; `now` is the clock, in
    nanoseconds.
    """

    def __init__(
        self,
        steps: StepRunner,
        occupancy: Occupancy,
        watcher: Watcher,
        readers: Pool,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._occupancy = occupancy
        self._report = report = occupancy.report
        self._now = now
        self._steps = steps
        self._watcher = watcher
        self._readers = readers
        # A thread for each that waits for its client: the controller sends few at a time.
        self._client_ends = ThreadPoolExecutor(MOST_CLIENT_ENDS, "atoll-client-ends")
        steps.on_report = lambda sequence, value: report(m.ValueReported(sequence, value))
        self.completed: deque[_Span] = deque()  # units that completed at once: see `report_completed`
        self._rows: deque[m.RowsMoved] = deque()  # of them
        self._reporting = threading.Lock()  # what is known of a unit's rows is sent ahead of its end

    def report_completed(self) -> None:
        """Report the units that completed while they were started, together: a message each would cost more.

        Any thread may call this: the executor's thread may be inside a unit that lasts, and cannot report then.
        """
        with self._reporting:
            completed = _taken(self.completed)
            if completed:
                self._report(*_taken(self._rows), m.Done(tuple(completed)))

    def _complete(self, unit: DispatchUnit, started: int) -> None:
        """It has completed while it was started."""
        self._rows += unit.take_rows()
        self.completed.append((unit.sequence, started, self._now()))

    def report_dropped(self, sequence: int) -> None:
        """The session has ended, or the run has failed: the unit counts as completed, without a result."""
        now = self._now()
        self._report(m.Done(((sequence, now, now),)))

    def watch(self, unit: DispatchUnit) -> None:
        """Has the unit's completion reported: from here where it is complete already, which is faster than to pass it
        to another thread.
        """
        if unit.futures:
            return
        if unit.callbacks:
            self.start_reads(unit)
            if are_complete(unit.completions):  # on a thread of its own
                self._await_client(unit)
            else:
                self._occupancy.begun(unit.sequence, unit.completions)
                start_in(self._client_ends, self._await_client, unit)
            return
        if unit.reads and not unit.completions:
            # They may refer to the unit, whose arrays would live until they are collected.
            reads, unit.reads = unit.reads, []
            left = _Reads(len(reads))
            if len(reads) == 1 and reads[0].at_once():
                self._read(unit, reads[0], left, self._complete)
            else:
                for each in reads:
                    start_in(self._readers, self._read, unit, each, left, self._report_end)
            return
        self.start_reads(unit)
        if not are_complete(unit.completions):
            unit.is_watched = True
            self._report_rows(unit)
            self._occupancy.begun(unit.sequence, unit.completions)
            last = unit.plan_run.plan.segments[unit.stop - 1]
            self._watcher.watch(self._steps.device_of(last), unit.sequence, unit.started, unit.completions)
            return
        failure = wait_for(unit.completions)
        if failure is not None:
            self._report(m.Failed(unit.sequence, failure))
        else:
            self._complete(unit, unit.started)

    def _report_end(self, unit: DispatchUnit, started: int) -> None:
        """It has completed; on any thread."""
        self._report(*unit.take_rows(), m.Done(((unit.sequence, started, self._now()),)))

    def _await_client(self, unit: DispatchUnit) -> None:
        """It ends when its client likes. What its callbacks raise may have been kept from XLA."""
        failure = wait_for(unit.completions)
        for each in unit.callbacks:
            failure = each.take_failure() or failure
        if failure is not None:
            self._report(m.Failed(unit.sequence, failure))
        else:
            self._report_end(unit, unit.started)

    def _read(
        self, unit: DispatchUnit, each: Read, left: _Reads, on_completed: Callable[[DispatchUnit, int], None]
    ) -> None:
        """One of the reads that a unit ends with."""
        with suppress(Exception):  # which reading raises, too, and gives back what is held for it
            each.wait()
        started, failure = self._now(), None  # until then the devices computed
        try:
            each.read()
        except Exception as error:
            failure = status_of(error)
        if not left.ended(started, failure):
            return
        if left.failure is not None:
            self._report(m.Failed(unit.sequence, left.failure.within(unit.plan_run.plan.name)))
        else:
            on_completed(unit, left.started)

    def start_reads(self, unit: DispatchUnit) -> None:
        """Has them done beside what the unit waits for: they are among its completions then."""
        for each in unit.reads:
            unit.completions.append(ReadCompletion(self._readers.submit(self._read_beside, unit, each)))
        unit.reads.clear()

    def _read_beside(self, unit: DispatchUnit, each: Read) -> None:
        each.read()
        if unit.is_watched:
            self._report_rows(unit)

    def _report_rows(self, unit: DispatchUnit) -> None:
        found = unit.take_rows()
        if found:
            self._report(*found)


def _taken(queue: deque[_Item]) -> list[_Item]:
    """Remove and return what is in the queue. Other threads may do the same, or append to it."""
    taken = []
    with suppress(IndexError):
        while True:
            taken.append(queue.popleft())
    return taken


class _Reads:
    """So many reads, until the last has ended: when the first could begin, and what went wrong in one. Any thread."""

    def __init__(self, count: int) -> None:
        self.started = sys.maxsize
        self.failure: Status | None = None
        self._left = count
        self._lock = threading.Lock()

    def ended(self, started: int, failure: Status | None) -> bool:
        """Whether it was the last."""
        with self._lock:
            self.started = min(self.started, started)
            self.failure = self.failure or failure
            self._left -= 1
            return not self._left
