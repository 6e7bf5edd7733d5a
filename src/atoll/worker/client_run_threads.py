"""Runs that wait for their client's Python on threads of their own.

XLA's CPU client runs a function with callbacks on one device inside of the call that enqueues it. It can be made to run
it on one of its own threads instead (`devices/xla/executable.py`), of which it has as many as the host has cores or
devices: a callback that runs two such functions at a time, which wait for each other, would find none left. Here each
run has a thread, its outputs are futures meanwhile, and as many as there are may wait for one another, as on stock JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.devices.device import LoadedFunction
from atoll.errors import Status
from atoll.host_services.calls.call_threads import Threads
from atoll.host_services.calls.client_errors import status_of
from atoll.ir import plan as p
from atoll.worker.dispatch_unit import DispatchUnit
from atoll.worker.future_arrays import FutureArray, Outcome
from atoll.worker.host_functions import Function
from atoll.worker.store import COMPUTED, NO_ARRAY, Buffer


def stream_of(unit: DispatchUnit, function: LoadedFunction) -> int:
    """XLA's execution stream for a run that may wait for its client; 0 for any other.

    A stream is in order. On one device each run has its own: a callback may run such a function itself. Those over
    several devices start one after another.
    """
    if not unit.callbacks:
        return 0
    return -1 - unit.sequence if function.waits_inside else unit.plan_run.run.session


def has_thread(step: p.Execute, unit: DispatchUnit, function: LoadedFunction) -> bool:
    """Whether the run has a thread of its own: it is all that its plan does, and consumes nothing.

    To consume an array is the executor's thread's alone (`worker/completions.py`).
    """
    segments = unit.plan_run.plan.segments
    alone = len(segments) == 1 and len(segments[0].steps) == 1
    return bool(unit.callbacks) and function.waits_inside and alone and not step.donated


class ClientRunThreads:
    """For the executor's thread."""

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
        """Run the step, with futures as its outputs. `releases` are called once its arguments are needed no more.

        They and `on_outcome` are called on the run's thread.
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
                ended = status_of(error)
            finally:
                for release in releases:
                    release()
            arguments.clear()
            on_outcome(Outcome(unit, futures, ended))

        self._threads.run(run)
