"""Walks plans, leg by leg, in the order in which the controller sent their turns.

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
from atoll.transport import messages as m
from atoll.worker.data_port import Inbox
from atoll.worker.ends import ReadEnd, Wait, is_over, outcome
from atoll.worker.steps import Steps, Stretch, Walk
from atoll.worker.store import Store

_log = logging.getLogger(__name__)

# What a session has done in its order.
_Item = Stretch | m.DropRun | m.Free | m.CloseStore


class ExpectsEnds(Protocol):
    def expect(self, device: int, sequence: int, started: int, waits: list[Wait]) -> None:
        """Will report the end of turn `sequence`, started at `started` nanoseconds, once all of `waits` are ready."""


class Walks:
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
        self._walks: dict[int, Walk] = {}  # those with legs to come, by the sequence number of their first
        self._parked: dict[int, deque[_Item]] = {}  # by session
        self._together: deque[Stretch] = deque()  # of those parked, what other hosts of the island compute with us
        self.ended: list[tuple[int, int, int]] = []  # turns that ended while they were started: see `tell_ended`

    def hear(self, message: Any) -> None:
        """Takes one of Run, Go, DropRun, Free, KeepPlan, DropPlan, OpenStore, CloseStore.

        What belongs to a session is done in order.
        """
        try:
            if type(message) is m.Run:
                self._run(message)
            elif type(message) is m.Go:
                self._go(message)
            elif type(message) in (m.Free, m.DropRun, m.CloseStore):
                self._in_turn(message.session, message)
            elif type(message) is m.KeepPlan:
                self._plans[message.plan] = message.body
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
        walk = Walk(run, plan)
        if len(plan.legs) > 1:
            self._walks[run.sequence] = walk
        self._turn(walk, run.sequence, run.legs)

    def _go(self, go: m.Go) -> None:
        for sequence, legs in go.turns:
            walk = self._walks.get(go.run)
            if walk is None:  # its session has ended
                self._drop(sequence)
            else:
                self._turn(walk, sequence, legs)

    def _turn(self, walk: Walk, sequence: int, legs: int) -> None:
        first, walk.legs = walk.legs, walk.legs + legs
        together = any(leg.together for leg in walk.plan.legs[first : walk.legs])
        self._in_turn(walk.run.session, Stretch(walk, first, walk.legs, sequence, together))

    def _in_turn(self, session: int, item: _Item) -> None:
        """Does it, unless something before it in its session is parked."""
        line = self._parked.get(session)
        if line is None and self._do(item):
            return
        if line is None:
            line = self._parked[session] = deque()
        line.append(item)
        if type(item) is Stretch and item.together:
            self._together.append(item)

    def go_on(self) -> None:
        """Does all that is parked and need not be any more."""
        progress = True
        while progress:
            progress = False
            for session, line in list(self._parked.items()):
                while line and self._do(line[0]):
                    item = line.popleft()
                    if type(item) is Stretch and item.together:
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
            case Stretch():
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

    def _walk(self, stretch: Stretch) -> bool:
        """Takes as many steps as it can; True where that was the last one, or the plan has failed."""
        walk = stretch.walk
        run, plan = walk.run, walk.plan
        store = self._stores.get(run.session)
        if store is None:
            self._drop(stretch.sequence)
            return True
        if walk.failure is not None:
            self._leave_out(stretch, walk.failure)
            return True
        if stretch.together and self._together and self._together[0] is not stretch:
            return False
        try:
            if not stretch.started:
                stretch.started = self._now()
            if walk.values is None:
                walk.values = {
                    value: store.get(handle) for value, handle in zip(plan.arguments, run.arguments, strict=True)
                }
            while stretch.leg < stretch.stop:
                leg = plan.legs[stretch.leg]
                while stretch.position < len(leg.steps):
                    step = leg.steps[stretch.position]
                    if type(step) is p.Receive and not self._is_here(step, stretch):
                        stretch.started = 0  # it takes no time of its own until then
                        return False
                    self._steps.take(step, stretch)
                    stretch.position += 1
                if leg.results:
                    handles = dict(zip(plan.results, run.results, strict=True))
                    for value in leg.results:
                        store.set(handles[value], walk.values[value])
                for value in leg.drops:
                    walk.values.pop(value, None)
                stretch.leg += 1
                stretch.position = 0
        except Exception as error:
            self._fail(stretch, store, status_of(error).within(plan.name))
            return True
        if stretch.stop == len(plan.legs):
            self._walks.pop(run.sequence, None)
        if run.acknowledge:
            self._report(m.Enqueued(stretch.sequence))
        self._expect_end(stretch)
        return True

    def _fail(self, stretch: Stretch, store: Store, status: Status) -> None:
        run, plan = stretch.walk.run, stretch.walk.plan
        unmade = {value for leg in plan.legs[stretch.leg :] for value in leg.results}  # others may be freed already
        for value, handle in zip(plan.results, run.results, strict=True):
            if value in unmade:
                store.set(handle, status)
        stretch.walk.failure = status
        stretch.walk.values = None
        self._leave(stretch)
        self._start_reads(stretch)  # they hold what they read
        self._report(m.Failed(stretch.sequence, status))

    def _leave_out(self, stretch: Stretch, failure: Status) -> None:
        """The walk has failed before. Where others compute this with us, they wait for us in vain: that is told."""
        self._leave(stretch)
        if stretch.together:
            self._report(m.Failed(stretch.sequence, failure))
        else:
            self._drop(stretch.sequence)

    def _leave(self, stretch: Stretch) -> None:
        """A walk that has failed is over with its last turn, or when it is dropped."""
        if stretch.stop == len(stretch.walk.plan.legs):
            self._walks.pop(stretch.walk.run.sequence, None)

    def _is_here(self, step: p.Receive, stretch: Stretch) -> bool:
        run = stretch.walk.run
        feeds = [run.feeds[piece.feed] for piece in step.pieces]
        if self._inbox.await_all(run.session, feeds, self._wake):
            return True
        self._start_reads(stretch)  # the other hosts may wait for them
        return False

    def _start_reads(self, stretch: Stretch) -> None:
        stretch.waits.extend(ReadEnd(self._readers.submit(each.read)) for each in stretch.reads)
        stretch.reads.clear()

    def _expect_end(self, stretch: Stretch) -> None:
        """Reports the turn's end: here where it is over already, since a hand-over to another thread takes longer."""
        if stretch.reads and (stretch.waits or len(stretch.reads) > 1):
            self._start_reads(stretch)
        if stretch.reads:
            (each,) = stretch.reads
            if each.at_once():
                self._read(stretch, each.read, self.ended.append)
            else:
                self._readers.submit(self._read, stretch, each.read, lambda end: self._report(m.Done((end,))))
            return
        if not is_over(stretch.waits):
            last = stretch.walk.plan.legs[stretch.stop - 1]
            self._ends.expect(self._steps.device_of(last), stretch.sequence, stretch.started, stretch.waits)
            return
        failure = outcome(stretch.waits)
        if failure is not None:
            self._report(m.Failed(stretch.sequence, failure))
        else:
            self.ended.append((stretch.sequence, stretch.started, self._now()))

    def _read(
        self, stretch: Stretch, read: Callable[[], None], on_end: Callable[[tuple[int, int, int]], None]
    ) -> None:
        started = self._now()
        try:
            read()
        except Exception as error:
            self._report(m.Failed(stretch.sequence, status_of(error).within(stretch.walk.plan.name)))
        else:
            on_end((stretch.sequence, started, self._now()))
