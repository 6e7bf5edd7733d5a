"""Detects the completion of dispatch units, and reports it.

There is one queue of units per device, so a long run on one device does not delay reports of another. The completions
of a queue are reported in the order of starts. Completions in quick succession share a message.
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
from atoll.host_services.calls.client_calls import status_of_device_error
from atoll.protocol import messages as m

# If at least this many short units are in flight, the watcher polls instead of waiting for each. Waiting would cost XLA
# and the interpreter two thread switches per run, and the controller a message. The next poll is when a quarter of the
# units should have completed, based on how long the last ones took. The watcher waits for longer runs, because polling
# would take CPU time from them.
_BUSY = 3
_SHORT_SECONDS = 7e-4
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 8e-4, 2e-3
_ARRAY_POLL_SECONDS = 2e-4


class DeletionGuard:
    """Protects arrays from being deleted or donated while another thread inspects them.

    jaxlib ends the process if a deleted array is asked whether it is ready. The thread that deletes arrays holds `lock`
    meanwhile. Threads that inspect arrays do not wait for it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def is_ready(self, array: DeviceArray) -> bool:
        """Return whether an array is ready. Raise RuntimeError if it is deleted, or arrays are just being deleted."""
        if not self.lock.acquire(blocking=False):
            raise RuntimeError("arrays are being deleted")
        try:
            if array.is_deleted():
                raise RuntimeError("the array is deleted")
            return bool(array.is_ready())
        finally:
            self.lock.release()


class Completion(Protocol):
    """The completion of work that a dispatch unit has started."""

    ready_means_complete: bool  # whether all of the work has completed once `is_ready` returns True

    def is_ready(self) -> bool:
        """Return whether the work is ready. Raise RuntimeError if only `block_until_ready` can determine that."""

    def block_until_ready(self) -> None:
        """Wait for the work, and raise its error."""


class RunCompletion:
    """The completion of a compiled function's run.

    Waiting for the run's token raises its error. An output, while it exists, shows without waiting whether it is ready.
    On several devices, the first output may be ready long before the last device has completed.
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
        """Return whether a later run on `devices` with these arguments needs this run's output on each device.

        The completion of the later run then implies this one's, and the later run fails if this one failed.
        """
        return self._output is not None and devices == self._devices and any(a is self._output for a in arguments)

    def is_ready(self) -> bool:
        """Return whether the first output is ready. Raise RuntimeError if only waiting can determine that."""
        if self._output is None:
            raise RuntimeError("a run without outputs")
        return self._guard.is_ready(self._output)

    def block_until_ready(self) -> None:
        self.token.block_until_ready()

    def busy_devices(self) -> tuple[int, ...]:
        """Return the run's devices, or none if it has certainly ended."""
        try:
            return () if self.is_ready() else self._devices
        except RuntimeError:
            return self._devices

    def unended_devices(self, shards_of: Callable[[DeviceArray], Sequence[DeviceArray]]) -> tuple[int, ...]:
        """Return the run's devices on which it is not known to have ended. `shards_of` returns the shards of an array.

        A run may last longer on one device than on others, for example in a loop.
        """
        busy = self.busy_devices()
        if len(busy) < 2 or self._output is None or not self._guard.lock.acquire(blocking=False):
            return busy
        try:
            shards = [] if self._output.is_deleted() else shards_of(self._output)
            if len(shards) != len(busy):
                return busy
            return tuple(device for device, shard in zip(busy, shards, strict=True) if not shard.is_ready())
        finally:
            self._guard.lock.release()


class ArrayCompletion:
    """The completion of an array that no compiled function makes, such as a transfer or a copy."""

    __slots__ = ("_guard", "array")
    ready_means_complete = True

    def __init__(self, array: DeviceArray, guard: DeletionGuard) -> None:
        self.array = array
        self._guard = guard

    def is_ready(self) -> bool:
        return self._guard.is_ready(self.array)

    def block_until_ready(self) -> None:
        """Wait by polling, because a thread inside jaxlib would not notice that the array is deleted."""
        while True:
            with self._guard.lock:
                if self.array.is_deleted():
                    return  # a later run has consumed it, so it has been ready
                if self.array.is_ready():
                    self.array.block_until_ready()  # does not wait; raises the error
                    return
            time.sleep(_ARRAY_POLL_SECONDS)


class ReadCompletion:
    """The completion of a result that a thread reads and sends."""

    __slots__ = ("_future",)
    ready_means_complete = True

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_ready(self) -> bool:
        return self._future.done()

    def block_until_ready(self) -> None:
        """Wait for the thread, and raise its error."""
        self._future.result()

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` on the reading thread when the read is done."""
        self._future.add_done_callback(lambda _: call())


class Watcher(Protocol):
    """Reports dispatch units that have completed. For real devices this uses threads, for null devices a clock."""

    def watch(self, device: int, sequence: int, started: int, completions: Sequence[Completion]) -> None:
        """Report the end or the failure of unit `sequence` once all of `completions` are ready.

        The unit started at `started` nanoseconds. Called on the executor's thread; must not block.
        """


# Sequence number, start in nanoseconds, and completions.
_Unit = tuple[int, int, Sequence[Completion]]


class CompletionWatcher:
    """A `Watcher` with one thread per device (an ordinal)."""

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
        each, last = _MIN_POLL_SECONDS, time.monotonic()  # seconds per unit, and the time of the last completion
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
        """Wait for the first unit, report it with all that have completed since, and return their number."""
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
    """Return whether the unit is known to be running. False if it has completed, or if only waiting can show that."""
    for completion in unit[2]:
        try:
            if not completion.is_ready():
                return True
        except RuntimeError:
            continue
    return False


def are_complete(completions: Sequence[Completion]) -> bool:
    """Return whether all have certainly completed, so that `wait_for` does not block."""
    try:
        return all(each.ready_means_complete and each.is_ready() for each in completions)
    except RuntimeError:
        return False


def wait_for(completions: Sequence[Completion]) -> Status | None:
    """Wait for all completions, and return the first error among them.

    Wait for the last one first. It usually needs the results of the others, so this thread sleeps and wakes only once.
    """
    failure: Status | None = None
    for completion in reversed(completions):
        try:
            completion.block_until_ready()
        except Exception as error:
            failure = status_of_device_error(error)
    return failure
