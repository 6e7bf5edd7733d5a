"""Runs plans, segment by segment, in the order in which the controller sent their turns.

A leg that awaits bytes of another host is *parked* with all that its session has sent after it; other sessions go on.
What several hosts of an island compute together keeps its order, though, on all of them: it does not overtake its like.

All of this runs on one thread, which waits for nothing but for the devices to take what is enqueued.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor as Pool
from contextlib import nullcontext
from typing import Any, Protocol

from atoll.errors import Code, Status, status_of
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.transfers.inbox import Inbox
from atoll.worker.ends import ReadEnd, Wait, is_over, outcome
from atoll.worker.steps import DispatchUnit, PlanRun, Steps
from atoll.worker.store import Store

_log = logging.getLogger(__name__)

# What a session has done in its order.
_Item = DispatchUnit | m.DropRun | m.Free | m.CloseStore


class ExpectsEnds(Protocol):
    def expect(self, device: int, sequence: int, started: int, waits: list[Wait]) -> None:
        """Will report the end of turn `sequence`, started at `started` nanoseconds, once all of `waits` are ready."""


class PlanExecutor:
    """Owns the stores. `hear` takes messages in order; `report` sends back what came of them.

    `wake` is called on any thread once bytes that a parked leg awaited are here: `go_on` is to be called then.
    `now` is the clock, in nanoseconds.
    """

    def __init__(
        self,
        steps: Steps,
        inbox: Inbox,
        report: Callable[..., None],
        ends: ExpectsEnds,
        readers: Pool,
        wake: Callable[[], None],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._steps = steps
        self._inbox = inbox
        self._report = report
        self._ends = ends
        self._readers = readers
        self._wake = wake
        self._now = now
        self._stores: dict[int, Store] = {}
        self._plans: dict[int, p.Plan] = {}
        self._walks: dict[int, PlanRun] = {}  # those with legs to come, by the sequence number of their first
        self._parked: dict[int, deque[_Item]] = {}  # by session
        self._together: deque[DispatchUnit] = deque()  # of those parked, what other hosts of the island compute with us
        self.ended: list[tuple[int, int, int]] = []  # turns that ended while they were started: see `tell_ended`

    def hear(self, message: Any) -> None:
        """Takes one of Run, Go, DropRun, Free, RegisterPlan, DropPlan, OpenStore, CloseStore.

        What belongs to a session is done in order.
        """
        try:
            if type(message) is m.Run:
                self._run(message)
            elif type(message) is m.Dispatch:
                self._go(message)
            elif type(message) in (m.Free, m.DropRun, m.CloseStore):
                self._in_turn(message.session, message)
            elif type(message) is m.RegisterPlan:
                self._plans[message.plan] = message.definition
            elif type(message) is m.DropPlan:
                self._plans.pop(message.plan, None)
            elif type(message) is m.OpenStore:
                self._stores.setdefault(message.session, Store())
        except Exception:
            _log.exception("the executor failed at %s", type(message).__name__)

    def tell_ended(self) -> None:
        """Reports the turns that ended while they were started, together: a message each would cost more than they."""
        if self.ended:
            self._report(m.Done(tuple(self.ended)))
            self.ended.clear()

    def _run(self, run: m.Run) -> None:
        plan = self._plans.get(run.plan)
        if plan is None:
            if run.session not in self._stores:
                self._drop(run.sequence)
                return
            self._report(m.Failed(run.sequence, Status(Code.INTERNAL, f"plan {run.plan} is not on this host")))
            return
        walk = PlanRun(run, plan)
        if len(plan.segments) > 1:
            self._walks[run.sequence] = walk
        self._turn(walk, run.sequence, run.segments)

    def _go(self, go: m.Dispatch) -> None:
        for sequence, segments in go.turns:
            walk = self._walks.get(go.run)
            if walk is None:  # its session has ended
                self._drop(sequence)
            else:
                self._turn(walk, sequence, segments)

    def _turn(self, walk: PlanRun, sequence: int, segments: int) -> None:
        first, walk.segments = walk.segments, walk.segments + segments
        collective = any(segment.collective for segment in walk.plan.segments[first : walk.segments])
        self._in_turn(walk.run.session, DispatchUnit(walk, first, walk.segments, sequence, collective))

    def _in_turn(self, session: int, item: _Item) -> None:
        """Does it, unless something before it in its session is parked."""
        line = self._parked.get(session)
        if line is None and self._do(item):
            return
        if line is None:
            line = self._parked[session] = deque()
        line.append(item)
        if type(item) is DispatchUnit and item.collective:
            self._together.append(item)

    def go_on(self) -> None:
        """Does all that is parked and need not be any more."""
        progress = True
        while progress:
            progress = False
            for session, line in list(self._parked.items()):
                while line and self._do(line[0]):
                    item = line.popleft()
                    if type(item) is DispatchUnit and item.collective:
                        self._together.remove(item)  # not always the first: one that is dropped waits for nobody
                    progress = True
                if not line:
                    del self._parked[session]

    def _drop(self, sequence: int) -> None:
        """Nobody is interested in what the leg would have made."""
        now = self._now()
        self._report(m.Done(((sequence, now, now),)))

    def _do(self, item: _Item) -> bool:
        """True where it is done; False where it has to wait."""
        match item:
            case DispatchUnit():
                return self._walk(item)
            case m.Free(session=session, handles=handles, delete=delete):
                store = self._stores.get(session)
                if store is not None:
                    with self._steps.deletions.lock if delete else nullcontext():
                        for handle in handles:
                            store.free(handle, delete)
            case m.DropRun(run=run):
                self._walks.pop(run, None)
            case m.CloseStore(session=session):
                # In its turn, too: what other hosts compute together with us must not be dropped on this one alone.
                self._stores.pop(session, None)
                self._inbox.drop_session(session)
                for run in [run for run, walk in self._walks.items() if walk.run.session == session]:
                    del self._walks[run]
        return True

    def _walk(self, unit: DispatchUnit) -> bool:
        """Takes as many steps as it can; True where that was the last one, or the plan has failed."""
        walk = unit.walk
        run, plan = walk.run, walk.plan
        store = self._stores.get(run.session)
        if store is None:
            self._drop(unit.sequence)
            return True
        if walk.failure is not None:
            self._leave_out(unit, walk.failure)
            return True
        if unit.collective and self._together and self._together[0] is not unit:
            return False
        try:
            if not unit.started:
                unit.started = self._now()
            if walk.values is None:
                walk.values = {
                    value: store.get(handle) for value, handle in zip(plan.arguments, run.arguments, strict=True)
                }
            while unit.segment < unit.stop:
                segment = plan.segments[unit.segment]
                while unit.position < len(segment.steps):
                    step = segment.steps[unit.position]
                    if type(step) is p.Receive and not self._is_here(step, unit):
                        unit.started = 0  # it takes no time of its own until then
                        return False
                    self._steps.take(step, unit)
                    unit.position += 1
                if segment.results:
                    handles = dict(zip(plan.results, run.results, strict=True))
                    for value in segment.results:
                        store.set(handles[value], walk.values[value])
                for value in segment.drops:
                    walk.values.pop(value, None)
                unit.segment += 1
                unit.position = 0
        except Exception as error:
            self._fail(unit, store, status_of(error).within(plan.name))
            return True
        if unit.stop == len(plan.segments):
            self._walks.pop(run.sequence, None)
        if run.acknowledge:
            self._report(m.Enqueued(unit.sequence))
        self._expect_end(unit)
        return True

    def _fail(self, unit: DispatchUnit, store: Store, status: Status) -> None:
        run, plan = unit.walk.run, unit.walk.plan
        unmade = {
            value for segment in plan.segments[unit.segment :] for value in segment.results
        }  # others may be freed already
        for value, handle in zip(plan.results, run.results, strict=True):
            if value in unmade:
                store.set(handle, status)
        unit.walk.failure = status
        unit.walk.values = None
        self._leave(unit)
        self._start_reads(unit)  # they hold what they read
        self._report(m.Failed(unit.sequence, status))

    def _leave_out(self, unit: DispatchUnit, failure: Status) -> None:
        """The walk has failed before. Where others compute this with us, they wait for us in vain: that is told."""
        self._leave(unit)
        if unit.collective:
            self._report(m.Failed(unit.sequence, failure))
        else:
            self._drop(unit.sequence)

    def _leave(self, unit: DispatchUnit) -> None:
        """A walk that has failed is over with its last turn, or when it is dropped."""
        if unit.stop == len(unit.walk.plan.segments):
            self._walks.pop(unit.walk.run.sequence, None)

    def _is_here(self, step: p.Receive, unit: DispatchUnit) -> bool:
        run = unit.walk.run
        feeds = [run.feeds[piece.feed] for piece in step.pieces]
        if self._inbox.await_all(run.session, feeds, self._wake):
            return True
        self._start_reads(unit)  # the other hosts may wait for them
        return False

    def _start_reads(self, unit: DispatchUnit) -> None:
        unit.waits.extend(ReadEnd(self._readers.submit(each.read)) for each in unit.reads)
        unit.reads.clear()

    def _expect_end(self, unit: DispatchUnit) -> None:
        """Reports the turn's end: here where it is over already, since a hand-over to another thread takes longer."""
        if unit.reads and (unit.waits or len(unit.reads) > 1):
            self._start_reads(unit)
        if unit.reads:
            (each,) = unit.reads
            if each.at_once():
                self._read(unit, each.read, self.ended.append)
            else:
                self._readers.submit(self._read, unit, each.read, lambda end: self._report(m.Done((end,))))
            return
        if not is_over(unit.waits):
            last = unit.walk.plan.segments[unit.stop - 1]
            self._ends.expect(self._steps.device_of(last), unit.sequence, unit.started, unit.waits)
            return
        failure = outcome(unit.waits)
        if failure is not None:
            self._report(m.Failed(unit.sequence, failure))
        else:
            self.ended.append((unit.sequence, unit.started, self._now()))

    def _read(
        self, unit: DispatchUnit, read: Callable[[], None], on_end: Callable[[tuple[int, int, int]], None]
    ) -> None:
        started = self._now()
        try:
            read()
        except Exception as error:
            self._report(m.Failed(unit.sequence, status_of(error).within(unit.walk.plan.name)))
        else:
            on_end((unit.sequence, started, self._now()))
