"""Reports how dispatch units end, after watching what they have enqueued and reading their results."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from atoll.cluster.processes.bugs import start_in
from atoll.devices.device import DeviceArray
from atoll.errors import Status
from atoll.host_services.calls.client_calls import status_of_device_error
from atoll.protocol import messages as m
from atoll.worker.completions import Completion, ReadCompletion, RunCompletion, Watcher, are_complete, wait_for
from atoll.worker.dispatch_unit import DispatchUnit, Read
from atoll.worker.read_threads import ReadThreads
from atoll.worker.step_runner import StepRunner

# The controller limits the runs of a host that wait for their clients in XLA's threads to this number
# (`launch.dependency_tracker`).
MAX_CLIENT_ENDS = 8
# A pseudo device for runs on several devices, because XLA's CPU devices run only one of them at a time.
_TOGETHER = -1
# Sequence number, start and end in nanoseconds.
_Span = tuple[int, int, int]
_Item = TypeVar("_Item")


class Occupancy:
    """The units that keep this host's devices busy. If they last too long, the controller charges only these.

    Other units in flight may wait for bytes of other hosts, for a user's Python or for a client that reads its results
    slowly, or be behind another unit on their devices.

    The executor's thread adds units, and any thread may call the other methods. `devices_of(unit)` returns the devices
    of the segment that a unit is enqueuing, and `shards_of` the shards of an array.
    """

    def __init__(
        self,
        report: Callable[..., None],
        devices_of: Callable[[DispatchUnit], tuple[int, ...]],
        shards_of: Callable[[DeviceArray], Sequence[DeviceArray]],
    ) -> None:
        self._report = report
        self._devices_of = devices_of
        self._shards_of = shards_of
        self._units: dict[int, Sequence[Completion]] = {}  # begun and not ended, in order
        # The unit that the executor's thread runs. XLA may run a program inside the call that enqueues it.
        self.executing: DispatchUnit | None = None

    def begun(self, sequence: int, completions: Sequence[Completion]) -> None:
        """Add a unit that has enqueued all its work."""
        self._units[sequence] = completions

    def report(self, *messages: Any) -> None:
        """Remove the units that have ended, and forward the messages."""
        for message in messages:
            if type(message) is m.Done:
                for sequence, _, _ in message.runs:
                    self._units.pop(sequence, None)
            elif type(message) is m.Failed:
                self._units.pop(message.sequence, None)
        self._report(*messages)

    def count_devices(self, sequence: int) -> int:
        """Return the number of devices on which a unit has not ended its runs, or 0 if it is unknown."""
        executing, completions = self.executing, self._units.get(sequence)
        if completions is not None:
            runs = [each for each in completions if isinstance(each, RunCompletion)]
            return len({device for run in runs for device in run.unended_devices(self._shards_of)})
        if executing is not None and executing.sequence == sequence:
            return len(set(self._devices_of(executing)))
        return 0

    def running(self) -> list[int]:
        """Return the units whose devices no earlier unit keeps busy."""
        executing = self.executing
        units = [(sequence, _busy(completions)) for sequence, completions in list(self._units.items())]
        if executing is not None:
            units.append((executing.sequence, _and_together(self._devices_of(executing))))
        found: list[int] = []
        busy: set[int] = set()
        for sequence, devices in units:
            if devices and busy.isdisjoint(devices):
                found.append(sequence)
            busy |= devices
        return found


class CompletionReporter:
    """Reports the ends of units. Used on the executor's thread, except if a method says otherwise.

    `occupancy` sends messages to the controller, from any thread. `now` returns nanoseconds.
    """

    def __init__(
        self,
        steps: StepRunner,
        occupancy: Occupancy,
        watcher: Watcher,
        read_threads: ReadThreads,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._occupancy = occupancy
        self._report = occupancy.report
        self._now = now
        self._steps = steps
        self._watcher = watcher
        self._read_threads = read_threads
        # Each unit that waits for its client has a thread.
        self._client_ends = ThreadPoolExecutor(MAX_CLIENT_ENDS, "atoll-client-ends")
        self.completed: deque[_Span] = deque()  # units that completed at once: see `report_completed`
        self._rows: deque[m.RowsMoved] = deque()  # of these units
        self._reporting = threading.Lock()  # keeps reports of rows before the ends of their units

    def report_completed(self) -> None:
        """Report all units that completed while they were started, in one message.

        Any thread may call this, because the executor's thread may be inside a long unit.
        """
        with self._reporting:
            completed = _taken(self.completed)
            if completed:
                self._report(*_taken(self._rows), m.Done(tuple(completed)))

    def _complete(self, unit: DispatchUnit, started: int) -> None:
        """Add a unit that completed while it was started."""
        self._rows += unit.take_rows()
        self.completed.append((unit.sequence, started, self._now()))

    def report_dropped(self, sequence: int) -> None:
        """Report a unit as completed without a result, because its session has ended or its run has failed."""
        now = self._now()
        self._report(m.Done(((sequence, now, now),)))

    def watch(self, unit: DispatchUnit) -> None:
        """Report the unit's completion, at once if it is complete, which is faster than using another thread."""
        if unit.futures:
            return
        if unit.callbacks:
            self.start_reads(unit)
            if are_complete(unit.completions):
                self._await_client(unit)
            else:
                self._occupancy.begun(unit.sequence, unit.completions)
                start_in(self._client_ends, self._await_client, unit)
            return
        if unit.reads and not unit.completions:
            # Reads may refer to the unit. A cycle would keep its arrays until the garbage collector runs.
            reads, unit.reads = unit.reads, []
            if len(reads) == 1 and self._try_read(unit, reads[0]):
                return
            left, threads = _Reads(len(reads)), self._read_threads.of(unit.plan_run.run.session)
            for each in reads:
                start_in(threads, self._read, unit, each, left)
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
        """Report that a unit has completed. Safe on any thread."""
        self._report(*unit.take_rows(), m.Done(((unit.sequence, started, self._now()),)))

    def _await_client(self, unit: DispatchUnit) -> None:
        """Wait for a unit that waits for its client, and report its end. XLA may not know its callbacks' errors."""
        failure = wait_for(unit.completions)
        for each in unit.callbacks:
            failure = each.take_failure() or failure
        if failure is not None:
            self._report(m.Failed(unit.sequence, failure))
        else:
            self._report_end(unit, unit.started)

    def _try_read(self, unit: DispatchUnit, each: Read) -> bool:
        """Do the only read with which a unit ends, and report the end. Return False if the read would block."""
        started = self._now()
        try:
            if not each.read_nowait():
                return False
        except Exception as error:
            self._report_failed_read(unit, status_of_device_error(error))
        else:
            self._complete(unit, started)
        return True

    def _report_failed_read(self, unit: DispatchUnit, failure: Status) -> None:
        self._report(m.Failed(unit.sequence, failure.within(unit.plan_run.plan.name)))

    def _read(self, unit: DispatchUnit, each: Read, left: _Reads) -> None:
        """Do one of the reads with which a unit ends. The last one reports the unit's end."""
        with suppress(Exception):  # `read` raises the error as well, and releases what is held for it
            each.wait()
        started, failure = self._now(), None  # the devices computed until now
        try:
            each.read()
        except Exception as error:
            failure = status_of_device_error(error)
        if not left.ended(started, failure):
            return
        if left.failure is not None:
            self._report_failed_read(unit, left.failure)
        else:
            self._report_end(unit, left.started)

    def start_reads(self, unit: DispatchUnit) -> None:
        """Start the unit's reads on other threads, and add them to its completions."""
        session = unit.plan_run.run.session
        for each in unit.reads:
            unit.completions.append(ReadCompletion(self._read_threads.submit(session, self._read_beside, unit, each)))
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
    """Remove and return all items. Other threads may do the same, or append items."""
    taken = []
    with suppress(IndexError):
        while True:
            taken.append(queue.popleft())
    return taken


class _Reads:
    """The reads of one unit, until the last has ended. Safe to use from any thread."""

    def __init__(self, count: int) -> None:
        self.started = sys.maxsize  # when the first read could begin
        self.failure: Status | None = None
        self._left = count
        self._lock = threading.Lock()

    def ended(self, started: int, failure: Status | None) -> bool:
        """Record the end of one read, and return whether it was the last."""
        with self._lock:
            self.started = min(self.started, started)
            self.failure = self.failure or failure
            self._left -= 1
            return not self._left


def _busy(completions: Sequence[Completion]) -> set[int]:
    """Return the devices on which runs among the completions have not ended."""
    found: set[int] = set()
    for each in completions:
        if isinstance(each, RunCompletion):
            found |= _and_together(each.busy_devices())
    return found


def _and_together(devices: tuple[int, ...]) -> set[int]:
    return {*devices, _TOGETHER} if len(devices) > 1 else set(devices)
