"""The executor: the thread that walks plans (see `walks`).

One thread enqueues; nothing in it waits for data. Small programs may run inside the call that enqueues them, and
may wait there for a peer: that is why this thread reads no messages. Other threads learn from XLA when runs have ended,
and a pool of threads reads results for clients and other hosts.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.transfers.inbox import Inbox
from atoll.worker.ends import Ends
from atoll.worker.steps import Steps
from atoll.worker.walks import PlanExecutor

_log = logging.getLogger(__name__)

# Each may wait for a client that does not read; there are enough for the others.
READ_THREADS = 64
# Ends that this thread sees itself are reported once it has nothing else to do, and not later than after so many: the
# controller's window must not run empty.
_ENDS_AT_A_TIME = 6


class _Wake:
    """Bytes that a parked leg awaited are here."""


class Executor:
    """Hands messages from the control thread to its own; `report` sends back what came of them, from any thread."""

    def __init__(self, steps: Steps, inbox: Inbox, report: Callable[..., None]) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        readers = ThreadPoolExecutor(READ_THREADS, "atoll-read")
        self.walks = PlanExecutor(steps, inbox, report, Ends(report), readers, lambda: self._queue.put(_Wake()))
        threading.Thread(target=self._work, name="atoll-executor", daemon=True).start()

    def submit(self, message: Any) -> None:
        """Takes what `PlanExecutor.hear` takes."""
        self._queue.put(message)

    def _work(self) -> None:
        walks = self.walks
        while True:
            if walks.ended and (len(walks.ended) >= _ENDS_AT_A_TIME or self._queue.empty()):
                walks.tell_ended()
            message = self._queue.get()
            if type(message) is _Wake:
                try:
                    walks.go_on()
                except Exception:
                    _log.exception("the executor failed to go on")
            else:
                walks.hear(message)
            del message  # or the last run's arguments live until the next message
