"""Dispatch units that wait for their client's Python, and how many of them there may be.

A callback takes as long as its client likes. So units that call their client, or need what such a unit makes, are kept
apart: they run on an execution stream of their session, each end is awaited by a thread of its own, and the controller
does not count them as work in flight. XLA's devices take few runs at once; beyond these bounds a session is parked.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.errors import Status
from atoll.worker.completions import wait_for
from atoll.worker.dispatch_unit import DispatchUnit, PlanRun

# On one host. With the window of other work in flight, they are what XLA's CPU client takes on a device.
MAX_UNITS = 8
MAX_UNITS_OF_A_SESSION = 4


class ClientUnits:
    """Those that have been enqueued and have not ended. `wake()` is called when one has, on any thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._count: Counter[int] = Counter()  # by session
        self._threads = ThreadPoolExecutor(MAX_UNITS, "atoll-client-unit")

    def __bool__(self) -> bool:
        return bool(self._count)

    def is_full(self, session: int) -> bool:
        """Whether no more may be enqueued for the session now."""
        return self._count[session] >= MAX_UNITS_OF_A_SESSION or sum(self._count.values()) >= MAX_UNITS

    def await_end(self, unit: DispatchUnit, then: Callable[[Status | None], Any]) -> None:
        """The unit has been enqueued: calls `then` with its failure, if any, once it has ended; on any thread."""
        session = unit.plan_run.run.session
        with self._lock:
            self._count[session] += 1
        self._threads.submit(self._await, session, unit, then)

    def _await(self, session: int, unit: DispatchUnit, then: Callable[[Status | None], Any]) -> None:
        failure = wait_for(unit.completions)
        assert unit.client_run is not None
        unit.client_run.has_ended = True
        with self._lock:
            self._count[session] -= 1
            if not self._count[session]:
                del self._count[session]
        then(failure)
        self._wake()


def waits_for_client(plan_run: PlanRun) -> bool:
    """Whether it needs what a unit makes that waits for its client."""
    runs = [plan_run.client_run, *(buffer.client_run for buffer in (plan_run.values or {}).values())]
    return any(run is not None and not run.has_ended for run in runs)
