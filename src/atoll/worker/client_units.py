"""Dispatch units that wait for their client's Python, and how many of them there may be.

A callback takes as long as its client likes. So units that call their client, or need what such a unit makes, are kept
apart: they run on an execution stream of their session, each end is awaited by a thread of its own, and the controller
does not count them as work in flight. XLA's devices take few runs at once; beyond these bounds a session is parked.
Of a function over several devices one unit runs at a time: what its callbacks raise is kept until it ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.errors import Status
from atoll.host_services.calls.callbacks import Callbacks
from atoll.ir import plan as p
from atoll.worker.completions import wait_for
from atoll.worker.dispatch_unit import DispatchUnit, PlanRun
from atoll.worker.store import ClientRun

# On one host. With the window of other work in flight, they are what XLA's CPU client takes on a device.
MAX_UNITS = 8
MAX_UNITS_OF_A_SESSION = 4


class ClientUnits:
    """Those that have been enqueued and have not ended. `wake()` is called when one has, on any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._count: Counter[int] = Counter()  # by session
        self._running: set[Callbacks] = set()  # of functions over several devices
        self._threads = ThreadPoolExecutor(MAX_UNITS, "atoll-client-unit")

    def __bool__(self) -> bool:
        return bool(self._count)

    def must_wait(self, unit: DispatchUnit) -> bool:
        """Whether the unit may not be enqueued now."""
        of_session = self._count[unit.plan_run.run.session]
        return (
            of_session >= MAX_UNITS_OF_A_SESSION
            or sum(self._count.values()) >= MAX_UNITS
            or not self._running.isdisjoint(unit.callbacks)
        )

    def await_end(self, unit: DispatchUnit, then: Callable[[Status | None], Any]) -> None:
        """The unit has been enqueued: calls `then` with its failure, if any, once it has ended; on any thread."""
        session = unit.plan_run.run.session
        with self._lock:
            self._count[session] += 1
            self._running.update(each for each in unit.callbacks if each.spans_devices)
        self._threads.submit(self._await, session, unit, then)

    def _await(self, session: int, unit: DispatchUnit, then: Callable[[Status | None], Any]) -> None:
        run = unit.client_run
        assert run is not None
        own = wait_for(unit.completions)
        failure = run.needed() or own
        for each in unit.callbacks:
            failure = each.take_failure() or failure
        run.end(failure)
        with self._lock:
            self._running.difference_update(unit.callbacks)
            self._count[session] -= 1
            if not self._count[session]:
                del self._count[session]
        then(failure)
        self._wake()


def needs(plan_run: PlanRun) -> tuple[ClientRun, ...]:
    """The runs that wait for their clients, and make what it needs."""
    runs = [plan_run.client_run, *(buffer.client_run for buffer in (plan_run.values or {}).values())]
    return tuple({run: None for run in runs if run is not None and not run.has_ended})


def donates_what_others_read(unit: DispatchUnit) -> bool:
    """Whether it may have to wait for a run that waits for its client, and reads what this one consumes."""
    plan_run = unit.plan_run
    readers = [buffer.client_reader for buffer in (plan_run.values or {}).values()]
    return any(run is not None and not run.has_ended for run in readers) and any(
        (type(step) is p.Execute and step.donated) or (type(step) is p.Move and step.donate)
        for segment in plan_run.plan.segments[unit.segment : unit.stop]
        for step in segment.steps
    )
