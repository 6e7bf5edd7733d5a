"""Futures for arrays that a session's Python process is still computing, or a run that waits for its client.

A future takes the place of such an array in its buffer. Threads may wait for it. The controller dispatches launches
that need the array on a device only when it is available (`launch.dependency_tracker`). Only the executor's
thread resolves futures.

XLA's CPU client runs a function with callbacks on one device inside the call that enqueues it. It can run it on its own
threads (`devices/xla/executable.py`), but it has only as many as the host has cores or devices. If a callback runs two
such functions at a time that wait for each other, no thread may be left. So each run here has its own thread, and any
number of runs may wait for one another, as on stock JAX.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from atoll.devices.device import LoadedFunction
from atoll.errors import Status, invalid
from atoll.host_services.calls.call_threads import Threads
from atoll.host_services.calls.client_calls import status_of_device_error
from atoll.ir import plan as p
from atoll.ir.plan import LocalArray
from atoll.worker.dispatch_unit import DispatchUnit
from atoll.worker.function_records import Function
from atoll.worker.store import COMPUTED, NO_ARRAY, Buffer


class FutureArray:
    """Takes the place of a `DeviceArray` that is not available yet."""

    nbytes = 0

    def __init__(self) -> None:
        self._done = threading.Event()
        self._array: Any = None
        self.failure: Status | None = None
        self._is_deleted = False

    def set_result(self, array: Any) -> None:
        self._array = array
        self._done.set()

    def fail(self, status: Status) -> None:
        self.failure = status
        self._done.set()

    def wait(self) -> Any:
        """Wait for the array and return it. Raise the failure if it was not computed."""
        self._done.wait()
        raise_failure(self)
        if self._array is None:
            raise invalid("the array has been deleted or donated")
        return self._array

    def is_ready(self) -> bool:
        return False

    def is_deleted(self) -> bool:
        return self._is_deleted or self.failure is not None

    def delete(self) -> None:
        """Mark the array, so that it is deleted once it is available."""
        self._is_deleted = True

    def block_until_ready(self) -> None:
        self.wait()


def raise_failure(array: Any) -> None:
    """Raise the failure if `array` is a future that failed."""
    if isinstance(array, FutureArray) and array.failure is not None:
        raise array.failure.exception()


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a unit's futures: for each, the contents of its local shards, or one failure for all.

    If a future has no `LocalArray`, its contents are the array itself.
    """

    unit: DispatchUnit
    futures: Sequence[tuple[Buffer, FutureArray, LocalArray | None]]
    contents: Sequence[Sequence[np.ndarray[Any, Any]] | Any] | Status


def stream_of(unit: DispatchUnit, function: LoadedFunction) -> int:
    """Return XLA's execution stream for a run that may wait for its client, or 0 for other runs.

    The runs of a stream are in order. On one device each run has its own stream, because its callback may run such a
    function itself. Runs on several devices start one after another.
    """
    if not unit.callbacks:
        return 0
    return -1 - unit.sequence if function.waits_inside else unit.plan_run.run.session


def runs_on_own_thread(step: p.Execute, unit: DispatchUnit, function: LoadedFunction) -> bool:
    """Return whether the run has a separate thread, since it may wait for its client inside XLA.

    Only a run that is the only step of its plan has one, and only if it donates nothing, because only the executor's
    thread may donate an array (`worker/completions.py`).
    """
    if not unit.callbacks or not function.waits_inside or step.donated:
        return False
    segments = unit.plan_run.plan.segments
    return len(segments) == 1 and len(segments[0].steps) == 1


class ClientRunThreads:
    """Starts threads of runs that wait for their clients. Used on the executor's thread."""

    def __init__(self) -> None:
        self._threads = Threads()

    def start(
        self,
        step: p.Execute,
        unit: DispatchUnit,
        values: dict[int, Buffer],
        function: Function,
        arguments: list[Any],
        stream: int,
        releases: Sequence[Callable[[], None]],
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        """Run the step on a new thread, with futures as its outputs.

        `releases` are called once its arguments are no longer needed. These and `on_outcome` are called on the run's
        thread.
        """
        futures: list[tuple[Buffer, FutureArray, p.LocalArray | None]] = []
        for value, key in enumerate(function.output_keys, step.first_output):
            future = FutureArray()
            values[value] = Buffer(future, key, COMPUTED)
            futures.append((values[value], future, None))
        if step.completion:
            values[step.first_output + len(futures)] = Buffer(NO_ARRAY, -1, None)
        unit.futures += 1

        def run() -> None:
            try:
                ended: Sequence[Any] | Status = function.loaded.run(arguments, stream)
            except Exception as error:
                ended = status_of_device_error(error)
            finally:
                for release in releases:
                    release()
            arguments.clear()
            on_outcome(Outcome(unit, futures, ended))

        self._threads.run(run)


def live_array(buffer: Buffer) -> Any:
    """Return the array of a buffer. Raise an error if it is a completion, has failed or was deleted."""
    if buffer.spec is None:
        raise invalid("the completion of a call is not an array")
    if buffer.array.is_deleted():
        raise_failure(buffer.array)
        raise invalid("the array has been deleted or donated")
    return buffer.array
