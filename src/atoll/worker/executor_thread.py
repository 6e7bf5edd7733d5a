"""The executor's thread, which runs plans (see `plan_executor`).

One thread enqueues, and never waits for data. A small program may run inside the call that enqueues it, and wait there
for a peer, so this thread reads no messages. The thread that does handles short messages itself while this one is idle
(`submissions`). Other threads wait for XLA to complete runs, and a pool of threads reads results for clients and other
hosts.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.host_services.calls.call_messages import ReadWanted
from atoll.transfers.inbox import Inbox
from atoll.worker.completion_reporter import Occupancy
from atoll.worker.completions import CompletionWatcher
from atoll.worker.delegated_run_dispatcher import DelegatedRunDispatcher, DelegatedUnits, UnitsEnded
from atoll.worker.future_arrays import Outcome
from atoll.worker.joint_runs import JointRuns
from atoll.worker.plan_executor import PlanExecutor
from atoll.worker.read_threads import ReadThreads
from atoll.worker.spill_store import SpillStore
from atoll.worker.step_runner import StepRunner
from atoll.worker.submissions import Submissions

# The executor's thread reports units that complete at once when it is idle, or after this many, so that the
# controller's window does not run empty.
_COMPLETED_AT_A_TIME = 6


class _Wake:
    """Wakes the executor's thread because bytes that a blocked unit awaits have arrived."""


class _Completed:
    """Wakes the executor's thread because a unit has completed on another thread."""


# Messages to handle that other threads than that of the controller's messages queue.
_OTHERS = frozenset((Outcome, UnitsEnded))


class ExecutorThread:
    """A thread that runs the plan executor.

    `report` sends messages to the controller, from any thread. `messages` holds the messages for the thread, among them
    the outcomes of `steps`. `submit`, which is safe on any thread, handles a message of the controller or
    queues it for the thread.
    """

    def __init__(
        self,
        steps: StepRunner,
        inbox: Inbox,
        report: Callable[..., None],
        spill_store: SpillStore,
        messages: queue.SimpleQueue[Any],
    ) -> None:
        self._queue = messages
        delegated = DelegatedUnits(report, messages.put)
        occupancy = Occupancy(delegated.report, steps.devices_of, steps.shards_of)
        watcher = CompletionWatcher(occupancy.report)
        self.plan_executor = PlanExecutor(
            steps, inbox, occupancy, watcher, ReadThreads(), lambda: messages.put(_Wake()), spill_store
        )
        self.units = Units(self.plan_executor, occupancy, delegated, steps.joint_runs)
        handle = DelegatedRunDispatcher(delegated, self.plan_executor.handle, inbox.await_all).handle
        self._submissions = Submissions(messages, handle, self.plan_executor.is_short, self._report_soon)
        self.submit = self._submissions.add
        threading.Thread(target=self._work, name="atoll-executor", daemon=True).start()

    def read(self, session: int, wanted: ReadWanted, otherwise: Callable[[], None]) -> bool:
        """Send a small array to the session's client, now or when it is ready, and return True. Safe on any thread.

        Return False if it cannot be sent, for example because the executor's thread is busy. If a thread that waits for
        the array cannot send it, it calls `otherwise`. Raise StatusError if the session does not have the array.
        """
        return self._submissions.try_run(partial(self.plan_executor.read, session, wanted, otherwise))

    def _work(self) -> None:
        reporter, submissions = self.plan_executor.reporter, self._submissions
        while True:
            if reporter.completed and (len(reporter.completed) >= _COMPLETED_AT_A_TIME or self._queue.empty()):
                reporter.report_completed()
            message = self._queue.get()
            kind = type(message)
            if kind is _Wake:
                submissions.run(self.plan_executor.resume_blocked)
            elif kind is not _Completed:
                submissions.handle(message, kind not in _OTHERS)
            del message  # otherwise the last run's arguments would live until the next message

    def _report_soon(self) -> None:
        """Have the thread report units that the submitting thread has completed, with those that follow at once."""
        if self.plan_executor.reporter.completed:
            self._queue.put(_Completed())


class Units:
    """The units of a host. Safe to use from any thread, even while the executor's thread is inside a long unit."""

    def __init__(
        self,
        plan_executor: PlanExecutor,
        occupancy: Occupancy,
        delegated: DelegatedUnits,
        joint_runs: JointRuns,
    ) -> None:
        self._occupancy = occupancy
        self._delegated = delegated
        self.report_completed = plan_executor.reporter.report_completed
        self.end = plan_executor.ended_runs.add
        self.failed_on_devices = joint_runs.failed_on_devices

    def running(self) -> tuple[int, ...]:
        """Return the gangs that keep this host's devices busy."""
        return tuple(dict.fromkeys(map(self._delegated.gang_of, self._occupancy.running())))

    def of_gang(self, sequence: int) -> list[tuple[int, int]]:
        """Return the units of the gang that are in flight, with the number of devices of each (0 if unknown).

        Only a delegated run has several units.
        """
        return [(unit, self._occupancy.count_devices(unit)) for unit in self._delegated.units_of(sequence)]
