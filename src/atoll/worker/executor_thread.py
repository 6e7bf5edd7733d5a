"""The executor's thread, which runs plans (see `plan_executor`).

One thread enqueues; nothing in it waits for data. Small programs may run inside the call that enqueues them, and
may wait there for a peer: that is why this thread reads no messages. Other threads learn from XLA when runs have
completed, and a pool of threads reads results for clients and other hosts.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.transfers.inbox import Inbox
from atoll.worker.completions import CompletionWatcher
from atoll.worker.delegated_run_dispatcher import DelegatedRunDispatcher
from atoll.worker.occupancy import Occupancy
from atoll.worker.plan_executor import PlanExecutor
from atoll.worker.spill_store import SpillStore
from atoll.worker.step_runner import StepRunner
from atoll.worker.units import Units

# Each may wait for a client that does not read; there are enough for the others.
READ_THREADS = 64
# Units that this thread sees complete are reported once it has nothing else to do, and not later than after so many:
# the controller's window must not run empty.
_COMPLETED_AT_A_TIME = 6


class _Wake:
    """Bytes that a blocked unit awaited are here."""


class ExecutorThread:
    """Passes messages from the control thread to its own; `report` sends back what came of them, from any thread."""

    def __init__(self, steps: StepRunner, inbox: Inbox, report: Callable[..., None], spill_store: SpillStore) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        readers = ThreadPoolExecutor(READ_THREADS, "atoll-read")
        self._delegated_runs = DelegatedRunDispatcher(report, self._queue.put)
        occupancy = Occupancy(self._delegated_runs.report, steps.devices_of)
        watcher = CompletionWatcher(occupancy.report)
        self.plan_executor = PlanExecutor(
            steps, inbox, occupancy, watcher, readers, lambda: self._queue.put(_Wake()), spill_store
        )
        self.units = Units(self.plan_executor.reporter, occupancy, self._delegated_runs)
        self._delegated_runs.execute, self._delegated_runs.await_feeds = self.plan_executor.handle, inbox.await_all
        steps.on_outcome = self.submit
        threading.Thread(target=self._work, name="atoll-executor", daemon=True).start()

    def submit(self, message: Any) -> None:
        """Takes what `PlanExecutor.handle` takes. Any thread."""
        self._queue.put(message)

    def _work(self) -> None:
        executor, reporter = self.plan_executor, self.plan_executor.reporter
        while True:
            if reporter.completed and (len(reporter.completed) >= _COMPLETED_AT_A_TIME or self._queue.empty()):
                reporter.report_completed()
            message = self._queue.get()
            if type(message) is _Wake:
                executor.resume_blocked()
            else:
                self._delegated_runs.handle(message)
            del message  # or the last run's arguments live until the next message
