"""Learns when dispatch units have completed, and reports it.

One queue of units a device: what one device is busy with for long does not delay reports of another. Along a queue,
completions are reported in the order of starts, many in one message where they come quickly.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from atoll.devices.device import DeviceArray, RunToken
from atoll.errors import Status
from atoll.host_services.calls.client_errors import status_of
from atoll.protocol import messages as m

# With so many short units in flight the next completion need not be known at once: the watcher polls now and then, and
# waits on none. To wait would cost XLA and the interpreter two thread switches a run, and the controller a message. The
# next poll comes when a quarter of them should have completed, by how long the last ones took. Longer runs are waited
# for: to poll meanwhile would take the CPU from them.
_BUSY = 3
_SHORT_SECONDS = 7e-4
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 8e-4, 2e-3
_ARRAY_POLL_SECONDS = 2e-4


class DeletionGuard:
    """Keeps arrays from being deleted or donated while another thread asks about them.

    jaxlib ends the process where a deleted array is asked whether it is ready. The thread that deletes holds `lock`
    meanwhile; the threads that ask do not wait for it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def is_ready(self, array: DeviceArray) -> bool:
        """Raises RuntimeError where that cannot be told: the array is deleted, or is just being deleted."""
        if not self.lock.acquire(blocking=False):
            raise RuntimeError("arrays are being deleted")
        try:
            if array.is_deleted():
                raise RuntimeError("the array is deleted")
            return bool(array.is_ready())
        finally:
            self.lock.release()


class Completion(Protocol):
    """The completion of something that a dispatch unit has started.

    `ready_means_complete`: whether all of it has completed once `is_ready` says so.
    """

    ready_means_complete: bool

    def is_ready(self) -> bool:
        """Raises RuntimeError where only waiting can tell."""

    def block_until_ready(self) -> None:
        """Raises what went wrong."""


class RunCompletion:
    """The completion of a compiled function's run.

    The run's token can be waited for, and raises what went wrong. An output, while it lives, says at once whether it
    is ready; on several devices the first output may be ready a while before the last device has completed.
    """

    __slots__ = ("_devices", "_guard", "_output", "ready_means_complete", "token")

    def __init__(
        self, token: RunToken, outputs: Sequence[DeviceArray], guard: DeletionGuard, devices: tuple[int, ...]
    ) -> None:
        self.token = token
        self._output = outputs[0] if outputs else None
        self._guard = guard
        self._devices = devices
        self.ready_means_complete = len(devices) == 1

    def is_implied_by(self, arguments: Sequence[DeviceArray], devices: tuple[int, ...]) -> bool:
        """Whether a run on `devices` that takes these arguments needs this output on each of its devices: the
        completion of the later run then tells that this one has completed, and it fails where this one did.
        """
        return self._output is not None and devices == self._devices and any(a is self._output for a in arguments)

    def is_ready(self) -> bool:
        """Raises RuntimeError where only waiting can tell."""
        if self._output is None:
            raise RuntimeError("a run without outputs")
        return self._guard.is_ready(self._output)

    def block_until_ready(self) -> None:
        self.token.block_until_ready()

    def busy_devices(self) -> tuple[int, ...]:
        """Return the run's devices; none if it has certainly ended."""
        try:
            return () if self.is_ready() else self._devices
        except RuntimeError:
            return self._devices


class ArrayCompletion:
    """The completion of what makes an array without a compiled function: a transfer, a copy."""

    __slots__ = ("_guard", "array")
    ready_means_complete = True

    def __init__(self, array: DeviceArray, guard: DeletionGuard) -> None:
        self.array = array
        self._guard = guard

    def is_ready(self) -> bool:
        return self._guard.is_ready(self.array)

    def block_until_ready(self) -> None:
        """Waits by polling: a thread inside jaxlib would not notice that the array is deleted."""
        while True:
            with self._guard.lock:
                if self.array.is_deleted():
                    return  # a later run has consumed it, so it has been ready
                if self.array.is_ready():
                    self.array.block_until_ready()  # does not wait; raises what went wrong
                    return
            time.sleep(_ARRAY_POLL_SECONDS)


class ReadCompletion:
    """The completion of what a thread reads and sends off."""

    __slots__ = ("_future",)
    ready_means_complete = True

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_ready(self) -> bool:
        return self._future.done()

    def block_until_ready(self) -> None:
        """Waits for the thread; raises what went wrong there."""
        self._future.result()

    def when_done(self, call: Callable[[], object]) -> None:
        """Calls it then, on the reading thread."""
        self._future.add_done_callback(lambda _: call())


class Watcher(Protocol):
    """Reports dispatch units that have completed: threads do so for real devices, a clock for null ones."""

    def watch(self, device: int, sequence: int, started: int, completions: Sequence[Completion]) -> None:
        """Will report that unit `sequence`, started at `started` nanoseconds, has completed, once all of `completions`
        are ready, or that it has failed. Called by the executor's thread; must not block.
        """


# Sequence number, start in nanoseconds, and what is ready once the unit has completed.
_Unit = tuple[int, int, Sequence[Completion]]


class CompletionWatcher:
    """Watches units that are in flight, with one thread for each device (an ordinal). See `Watcher`."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._queues: dict[int, queue.SimpleQueue[_Unit]] = {}

    def watch(self, device: int, sequence: int, started: int, completions: Sequence[Completion]) -> None:
        units = self._queues.get(device)
        if units is None:
            units = self._queues[device] = queue.SimpleQueue()
            name = f"atoll-completions-{device}"
            threading.Thread(target=self._work, args=(units,), name=name, daemon=True).start()
        units.put((sequence, started, completions))

    def _work(self, units: queue.SimpleQueue[_Unit]) -> None:
        running: deque[_Unit] = deque()
        each, last = _MIN_POLL_SECONDS, time.monotonic()  # what a unit takes, and when some last completed
        while True:
            if not running:
                running.append(units.get())
                last = time.monotonic()
            while not units.empty():
                running.append(units.get())
            if len(running) >= _BUSY and each < _SHORT_SECONDS and _is_running(running[0]):
                time.sleep(min(max(each * len(running) / 4, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS))
                if _is_running(running[0]):
                    continue
            count = self._report_completed(running)
            now = time.monotonic()
            each, last = (now - last) / count, now

    def _report_completed(self, running: deque[_Unit]) -> int:
        """Waits for the first unit, and reports it with all that have completed since; how many these are."""
        count = len(running)
        completed: list[tuple[int, int, int]] = []
        while running and not (completed and _is_running(running[0])):
            sequence, started, completions = running.popleft()
            failure = wait_for(completions)
            if failure is None:
                completed.append((sequence, started, time.monotonic_ns()))
            else:
                self._report(m.Done(tuple(completed)), m.Failed(sequence, failure))
                completed = []
        if completed:
            self._report(m.Done(tuple(completed)))
        return count - len(running)


def _is_running(unit: _Unit) -> bool:
    """Whether the unit is certainly running; False where it has completed, or where only waiting can tell."""
    for completion in unit[2]:
        try:
            if not completion.is_ready():
                return True
        except RuntimeError:
            continue
    return False


def are_complete(completions: Sequence[Completion]) -> bool:
    """Whether all have certainly completed, so that `wait_for` does not block."""
    try:
        return all(each.ready_means_complete and each.is_ready() for each in completions)
    except RuntimeError:
        return False


def wait_for(completions: Sequence[Completion]) -> Status | None:
    """Waits for all; returns the first error among them.

    The last one first: most often it needs the others' results, so that this thread sleeps and wakes once.
    """
    failure: Status | None = None
    for completion in reversed(completions):
        try:
            completion.block_until_ready()
        except Exception as error:
            failure = status_of(error)
    return failure
