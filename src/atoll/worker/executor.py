"""The executor: walks plans in the order in which the controller sent them.

One thread enqueues; nothing in it waits for data. Small programs may run inside the call that enqueues them, and
may wait there for a peer: that is why this thread reads no messages. Other threads learn from XLA when runs have ended,
and a pool of threads reads results for clients and other hosts.

A plan that awaits bytes of another host is *parked* with all that its session has sent after it; other sessions go on.
What several hosts of an island compute together keeps its order, though, on all of them: it does not overtake its like.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from atoll.errors import Code, Status, status_of
from atoll.ir import plan as p
from atoll.transport import messages as m
from atoll.worker.data_port import DataPort
from atoll.worker.ends import Deletions, Ends, ReadEnd, is_over, outcome
from atoll.worker.functions import Functions
from atoll.worker.steps import Steps, Walk
from atoll.worker.store import Store, TypeKeys
from atoll.worker.xla.backend import Backend

_log = logging.getLogger(__name__)

# Each may wait for a client that does not read; there are enough for the others.
READ_THREADS = 64
# Ends that this thread sees itself are reported once it has nothing else to do, and not later than after so many: the
# controller's window must not run empty.
_ENDS_AT_A_TIME = 6


# What a session has done in its order.
_Item = Walk | m.Free | m.CloseStore


class _Wake:
    """Bytes that a parked plan awaited are here."""


class Executor:
    """Owns the stores. `submit` takes messages from the control thread; `report` sends back what came of them."""

    def __init__(
        self,
        backend: Backend,
        functions: Functions,
        data_port: DataPort,
        keys: TypeKeys,
        report: Callable[..., None],
        host: int,
    ) -> None:
        self._inbox = data_port.inbox
        self._report = report
        self._stores: dict[int, Store] = {}
        self._plans: dict[int, p.Plan] = {}
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._parked: dict[int, deque[_Item]] = {}  # by session
        self._together: deque[Walk] = deque()  # of those parked, what other hosts of the island compute with us
        self._ends = Ends(report)
        self._ended: list[tuple[int, int, int]] = []  # runs that ended while they were started, to be reported together
        self._deletions = Deletions()
        self._steps = Steps(backend, functions, data_port, keys, self._deletions, host)
        self._readers = ThreadPoolExecutor(READ_THREADS, "atoll-read")
        threading.Thread(target=self._work, name="atoll-executor", daemon=True).start()

    def submit(self, message: Any) -> None:
        """Takes one of Run, Free, KeepPlan, DropPlan, OpenStore, CloseStore; a session's are done in order."""
        self._queue.put(message)

    # ---- the executor's thread

    def _work(self) -> None:
        while True:
            if self._ended and (len(self._ended) >= _ENDS_AT_A_TIME or self._queue.empty()):
                self._report(m.Done(tuple(self._ended)))
                self._ended.clear()
            message = self._queue.get()
            try:
                if type(message) is m.Run:
                    self._run(message)
                elif type(message) is m.Free or type(message) is m.CloseStore:
                    self._in_turn(message.session, message)
                elif type(message) is _Wake:
                    self._go_on()
                elif type(message) is m.KeepPlan:
                    self._plans[message.plan] = message.body
                elif type(message) is m.DropPlan:
                    self._plans.pop(message.plan, None)
                elif type(message) is m.OpenStore:
                    self._stores.setdefault(message.session, Store())
            except Exception:
                _log.exception("the executor failed at %s", type(message).__name__)
            del message  # or the last run's arguments live until the next message

    def _run(self, run: m.Run) -> None:
        plan = self._plans.get(run.plan)
        if plan is None:
            if run.session not in self._stores:
                self._drop(run)
                return
            self._report(m.Failed(run.sequence, Status(Code.INTERNAL, f"plan {run.plan} is not on this host")))
            return
        self._in_turn(run.session, Walk(run, plan))

    def _in_turn(self, session: int, item: _Item) -> None:
        """Does it, unless something before it in its session is parked."""
        line = self._parked.get(session)
        if line is None and self._do(item):
            return
        if line is None:
            line = self._parked[session] = deque()
        line.append(item)
        if type(item) is Walk and item.plan.together:
            self._together.append(item)

    def _go_on(self) -> None:
        """Does all that is parked and need not be any more."""
        progress = True
        while progress:
            progress = False
            for session, line in list(self._parked.items()):
                while line and self._do(line[0]):
                    item = line.popleft()
                    if self._together and item is self._together[0]:
                        self._together.popleft()
                    progress = True
                if not line:
                    del self._parked[session]

    def _drop(self, run: m.Run) -> None:
        """Its session has ended, and with it all that the run would have made."""
        now = time.monotonic_ns()
        self._report(m.Done(((run.sequence, now, now),)))

    def _do(self, item: _Item) -> bool:
        """True where it is done; False where it has to wait."""
        if type(item) is m.Free:
            store = self._stores.get(item.session)
            if store is not None:
                with self._deletions.lock if item.delete else nullcontext():
                    for handle in item.handles:
                        store.free(handle, item.delete)
            return True
        if type(item) is m.CloseStore:
            # In its turn, too: what other hosts compute together with us must not be dropped on this one alone.
            self._stores.pop(item.session, None)
            self._inbox.drop_session(item.session)
            return True
        assert isinstance(item, Walk)
        return self._walk(item)

    def _walk(self, walk: Walk) -> bool:
        """Takes as many steps as it can; True where that was the last one, or the plan has failed."""
        run, plan = walk.run, walk.plan
        store = self._stores.get(run.session)
        if store is None:
            self._drop(run)
            return True
        if plan.together and self._together and self._together[0] is not walk:
            return False
        try:
            if walk.values is None:
                walk.started = time.monotonic_ns()
                walk.values = {
                    value: store.get(handle) for value, handle in zip(plan.arguments, run.arguments, strict=True)
                }
            while walk.position < len(plan.steps):
                step = plan.steps[walk.position]
                if type(step) is p.Receive and not self._is_here(step, walk):
                    return False
                self._steps.take(step, walk)
                walk.position += 1
            for value, handle in zip(plan.results, run.results, strict=True):
                store.set(handle, walk.values[value])
        except Exception as error:
            status = status_of(error).within(plan.name)
            for handle in run.results:
                store.set(handle, status)
            self._start_reads(walk)  # they hold what they read
            self._report(m.Failed(run.sequence, status))
            return True
        if run.acknowledge:
            self._report(m.Enqueued(run.sequence))
        self._expect_end(walk)
        return True

    def _is_here(self, step: p.Receive, walk: Walk) -> bool:
        feeds = [walk.run.feeds[piece.feed] for piece in step.pieces]
        if self._inbox.await_all(walk.run.session, feeds, self._wake):
            return True
        self._start_reads(walk)  # the other hosts may wait for them
        return False

    def _wake(self) -> None:
        self._queue.put(_Wake())

    def _start_reads(self, walk: Walk) -> None:
        walk.waits.extend(ReadEnd(self._readers.submit(each.read)) for each in walk.reads)
        walk.reads.clear()

    def _expect_end(self, walk: Walk) -> None:
        """Reports the run's end: here where it is over already, since a hand-over to another thread takes longer."""
        if walk.reads and (walk.waits or len(walk.reads) > 1):
            self._start_reads(walk)
        if walk.reads:
            (each,) = walk.reads
            if each.at_once():
                self._read(walk, each.read, self._ended.append)
            else:
                self._readers.submit(self._read, walk, each.read, lambda end: self._report(m.Done((end,))))
            return
        if not is_over(walk.waits):
            self._ends.expect(self._steps.device_of(walk.plan), walk.run.sequence, walk.started, walk.waits)
            return
        failure = outcome(walk.waits)
        if failure is not None:
            self._report(m.Failed(walk.run.sequence, failure))
        else:
            self._ended.append((walk.run.sequence, walk.started, time.monotonic_ns()))

    def _read(
        self, walk: Walk, read: Callable[[], None], on_end: Callable[[tuple[int, int, int]], None]
    ) -> None:
        started = time.monotonic_ns()
        try:
            read()
        except Exception as error:
            self._report(m.Failed(walk.run.sequence, status_of(error).within(walk.plan.name)))
        else:
            on_end((walk.run.sequence, started, time.monotonic_ns()))
