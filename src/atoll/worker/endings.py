"""How dispatch units end: what they have enqueued is watched and read, and what came of it reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor as Pool
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from atoll.host_services.calls.client_errors import status_of
from atoll.protocol import messages as m
from atoll.worker.completions import ReadCompletion, Watcher, are_complete, wait_for
from atoll.worker.dispatch_unit import DispatchUnit, Read
from atoll.worker.step_runner import StepRunner

# As many as the controller lets wait for their clients on a host in XLA's threads (`promises.client_runs`).
MOST_CLIENT_ENDS = 8


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
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._report = report
        self._now = now
        self._steps = steps
        self._watcher = watcher
        self._readers = readers
        # A thread for each that waits for its client: the controller sends few at a time.
        self._client_ends = ThreadPoolExecutor(MOST_CLIENT_ENDS, "atoll-client-ends")
        steps.on_report = lambda sequence, value: report(m.Reported(sequence, value))
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
        if unit.callbacks:
            self.start_reads(unit)
            if are_complete(unit.completions):  # on a thread of its own
                self._await_client(unit)
            else:
                self._client_ends.submit(self._await_client, unit)
            return
        if unit.reads and (unit.completions or len(unit.reads) > 1):
            self.start_reads(unit)
        if unit.reads:
            each = unit.reads.pop()  # it may refer to the unit, whose arrays would live until they are collected
            if each.at_once():
                self._read(unit, each, self.completed.append)
            else:
                self._readers.submit(self._read, unit, each, lambda span: self._report(m.Done((span,))))
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

    def _await_client(self, unit: DispatchUnit) -> None:
        """It ends when its client likes. What its callbacks raise may have been kept from XLA."""
        failure = wait_for(unit.completions)
        for each in unit.callbacks:
            failure = each.take_failure() or failure
        if failure is not None:
            self._report(m.Failed(unit.sequence, failure))
        else:
            self._report(m.Done(((unit.sequence, unit.started, self._now()),)))

    def _read(self, unit: DispatchUnit, each: Read, on_completed: Callable[[tuple[int, int, int]], None]) -> None:
        with suppress(Exception):  # which reading raises, too, and gives back what is held for it
            each.wait()
        started = self._now()  # until then the devices computed
        try:
            each.read()
        except Exception as error:
            self._report(m.Failed(unit.sequence, status_of(error).within(unit.plan_run.plan.name)))
        else:
            on_completed((unit.sequence, started, self._now()))

    def start_reads(self, unit: DispatchUnit) -> None:
        for each in unit.reads:
            unit.completions.append(ReadCompletion(self._readers.submit(each.read)))
        unit.reads.clear()
