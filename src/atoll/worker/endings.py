"""How dispatch units end: what they have enqueued is watched and read, and what came of it reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor as Pool
from functools import partial

from atoll.errors import Status
from atoll.host_services.calls.client_errors import status_of
from atoll.protocol import messages as m
from atoll.worker.client_units import ClientUnits
from atoll.worker.completions import ReadCompletion, Watcher, are_complete, wait_for
from atoll.worker.dispatch_unit import DispatchUnit, Read
from atoll.worker.step_runner import StepRunner
from atoll.worker.store import ClientRun


class Endings:
    """For the executor's thread. `report` sends messages to the controller, from any thread; `now` is the clock, in
    nanoseconds.
    """

    def __init__(
        self,
        steps: StepRunner,
        report: Callable[..., None],
        watcher: Watcher,
        readers: Pool,
        client_units: ClientUnits,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._report = report
        self._now = now
        self._steps = steps
        self._watcher = watcher
        self._readers = readers
        self._client_units = client_units
        self.completed: list[tuple[int, int, int]] = []  # units that completed at once: see `report_completed`

    def report_completed(self) -> None:
        """Reports the units that completed while they were started, together: a message each would cost more."""
        if self.completed:
            self._report(m.Done(tuple(self.completed)))
            self.completed.clear()

    def report_dropped(self, sequence: int) -> None:
        """The session has ended, or the run has failed: the unit counts as completed, without a result."""
        now = self._now()
        self._report(m.Done(((sequence, now, now),)))

    def watch(self, unit: DispatchUnit) -> None:
        """Has the unit's completion reported: from here where it is complete already, which is faster than to pass it
        to another thread.
        """
        if unit.promises:
            return
        if unit.client_run is not None:
            self.start_reads(unit)
            self._client_units.await_end(unit, lambda failure: self._report_end(unit, failure))
            return
        if unit.reads and (unit.completions or len(unit.reads) > 1):
            self.start_reads(unit)
        if unit.reads:
            (each,) = unit.reads
            if each.at_once():
                self._read(unit, each.read, self.completed.append)
            else:
                self._readers.submit(self._read, unit, each.read, lambda span: self._report(m.Done((span,))))
            return
        if not are_complete(unit.completions):
            last = unit.plan_run.plan.segments[unit.stop - 1]
            self._watcher.watch(self._steps.device_of(last), unit.sequence, unit.started, unit.completions)
            return
        failure = wait_for(unit.completions)
        if failure is not None:
            self._report(m.Failed(unit.sequence, failure))
        else:
            self.completed.append((unit.sequence, unit.started, self._now()))

    def _report_end(self, unit: DispatchUnit, failure: Status | None) -> None:
        if failure is not None:
            self._report(m.Failed(unit.sequence, failure))
        else:
            self._report(m.Done(((unit.sequence, unit.started, self._now()),)))

    def _read(
        self, unit: DispatchUnit, read: Callable[[], None], on_completed: Callable[[tuple[int, int, int]], None]
    ) -> None:
        started = self._now()
        try:
            read()
        except Exception as error:
            self._report(m.Failed(unit.sequence, status_of(error).within(unit.plan_run.plan.name)))
        else:
            on_completed((unit.sequence, started, self._now()))

    def start_reads(self, unit: DispatchUnit) -> None:
        for each in unit.reads:
            read = each.read if unit.client_run is None else partial(_read_after, unit.client_run, each)
            unit.completions.append(ReadCompletion(self._readers.submit(read)))
        unit.reads.clear()


def _read_after(run: ClientRun, each: Read) -> None:
    """Reads what such runs make: only once it is known to be no error."""
    failure = run.needed()
    if failure is not None:
        each.release()
        failure.raise_if_error()
    each.read()
