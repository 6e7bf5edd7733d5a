"""Runs plans, one dispatch unit after another, in the order in which the controller sent them.

A unit that awaits bytes from another host is *blocked*, with everything that its session has sent after it. Other
sessions continue. A unit that only receives waits *in the background* instead. Its session continues until it needs the
expected array. So an array that is copied to another island delays nothing there. Collectives keep their order on all
hosts of an island, so none overtakes a blocked one.

A unit that calls Python is not blocked: it completes when its futures are resolved. A unit that calls its client's
Python is enqueued like others, or has a thread and futures. The controller dispatches launches that need the results
of either only when the unit has ended.

All of this runs on one thread, which waits only for devices to accept work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec

from atoll.errors import Code, Status, StatusError, not_found
from atoll.host_services.calls.call_messages import ReadWanted
from atoll.host_services.calls.client_calls import status_of_device_error
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.transfers.inbox import Inbox
from atoll.worker.completion_reporter import CompletionReporter, Occupancy
from atoll.worker.completions import ArrayCompletion, Watcher
from atoll.worker.dispatch_unit import DispatchUnit, PlanRun
from atoll.worker.ended_runs import EndedRuns
from atoll.worker.future_arrays import Outcome
from atoll.worker.read_threads import ReadThreads
from atoll.worker.spill_store import SpillStore
from atoll.worker.step_runner import StepRunner
from atoll.worker.store import Buffer, Store

_RECEIVES = (p.Receive, p.ReceiveRows)  # steps that wait for other hosts
_FEW = 64  # buffers that are freed or read within microseconds
_TOGETHER_BYTES = 8 << 20  # of arrays that a unit awaits together
_READS = frozenset((p.Get, p.GetAll))  # steps that read arrays for the client
# Items of a session that are processed in order.
_Item = DispatchUnit | m.DropRun | m.Free | m.SpillRequest | m.CloseStore | m.DropFunction


class ExecutorStatistics(msgspec.Struct, frozen=True):
    """Counts of unfinished work."""

    plan_runs: int  # with segments to come
    blocked: int  # sessions
    background: int  # units
    blocked_collectives: int


class PlanExecutor:
    """Owns the stores, and runs units. `reporter` reports their ends.

    `wake` is called on any thread once the bytes that a blocked unit awaits have arrived. It has to make the executor's
    thread call `resume_blocked`.
    """

    def __init__(
        self,
        steps: StepRunner,
        inbox: Inbox,
        occupancy: Occupancy,
        watcher: Watcher,
        read_threads: ReadThreads,
        wake: Callable[[], None],
        spill_store: SpillStore,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._steps = steps
        self._inbox = inbox
        self._occupancy = occupancy
        self._report = occupancy.report
        self._wake = wake
        self._spill_store = spill_store
        self._now = now
        self._read_threads = read_threads
        self.reporter = CompletionReporter(steps, occupancy, watcher, read_threads, now)
        self._stores: dict[int, Store] = {}
        self._plans: dict[int, p.Plan] = {}
        self._reading_plans: set[int] = set()  # those that only read arrays for the client
        self._plan_runs: dict[int, PlanRun] = {}  # with segments to come, by the sequence number of their first unit
        self._blocked: dict[int, deque[_Item]] = {}  # by session
        self._background: dict[int, list[DispatchUnit]] = {}  # by session
        self._collectives = CollectiveOrder()
        self.ended_runs = EndedRuns()

    def is_short(self, message: Any) -> bool:
        """Return whether handling the message frees few buffers or reads few arrays, and nothing else."""
        if type(message) is m.Run:
            return message.plan in self._reading_plans and len(message.arguments) <= _FEW
        # Deletions wait for one another.
        return type(message) is m.Free and not message.delete and len(message.handles) <= _FEW

    def handle(self, message: Any) -> None:
        """Handle a message of the controller, or an Outcome. The messages of a session are processed in order."""
        kind = type(message)
        if kind is m.Run:
            self._run(message)
        elif kind is m.Dispatch:
            self._dispatch(message)
        elif kind in (m.Free, m.DropRun, m.SpillRequest, m.CloseStore):
            self._do_in_order(message.session, message)
        elif kind is m.DropFunction:
            self._do_in_order(self._steps.session_of(message.function), message)
        elif kind is m.RegisterPlan:
            self._plans[message.plan] = message.definition
            if _only_reads(message.definition):
                self._reading_plans.add(message.plan)
            if message.acknowledge:
                self._report(m.PlanRegistered(message.plan))
        elif kind is m.DropPlan:
            self._plans.pop(message.plan, None)
            self._reading_plans.discard(message.plan)
        elif kind is Outcome:
            self._end_futures(message)
        elif kind is m.CollectiveEnded:
            self._steps.call_ended(message.sequence)
            was_skipped = self._collectives.ended(message.sequence)
            if self._steps.joint_runs.ended(message.sequence) or was_skipped:
                self.resume_blocked()
        elif kind is m.CloseWorld:
            self._close_world(message)
        elif kind is m.ShareBuffers:
            self._share(message)
        elif kind is m.OpenStore:
            self._stores.setdefault(message.session, Store())
        elif kind is m.ReportStores:
            contents = (
                m.StoreContent(session, tuple(store.handles()), session in self._blocked)
                for session, store in self._stores.items()
            )
            self._report(m.StoresReported(message.check, tuple(contents)))

    def read(self, session: int, wanted: ReadWanted, otherwise: Callable[[], None]) -> bool:
        """Send a small array to the session's client, and return True. Return False if it cannot be sent.

        If the array is not ready, another thread sends it, or calls `otherwise`. Items of the session that are blocked
        may be meant to free or donate the array later. Raise StatusError if the session does not have it.
        """
        store = self._stores.get(session)
        if store is None:
            return False
        start = partial(self._read_threads.try_submit, session)
        return self._steps.client_reads.send(session, wanted, store.get(wanted.handle), start, otherwise)

    def _close_world(self, message: m.CloseWorld) -> None:
        """Fail the ended runs that are blocked, and forget those that had begun. All of them have arrived."""
        self._steps.joint_runs.closed(message.world, message.successor, message.ended)
        items = [item for blocked in self._blocked.values() for item in blocked]
        units = [each for each in items if type(each) is DispatchUnit]
        units += [unit for some in self._background.values() for unit in some]
        self.ended_runs.forget(message.ended, {unit.sequence for unit in units})
        self.resume_blocked()

    def _share(self, message: m.ShareBuffers) -> None:
        """Share buffers between two sessions, at once. If a buffer is missing, its new handle has the error."""
        source, target = self._stores.get(message.source), self._stores.get(message.target)
        if target is None:  # the session has ended
            return
        for handle, shared in message.handles:
            try:
                if source is None:
                    raise not_found(f"session {message.source} has no store on this host")
                target.set(shared, self._steps.view(source.get(handle)))
            except StatusError as error:
                target.set(shared, error.status)

    def buffer(self, session: int, handle: int) -> Buffer:
        """Return a buffer of a session. Raise KeyError without the session, and StatusError without the buffer."""
        return self._stores[session].get(handle)

    def statistics(self) -> ExecutorStatistics:
        background = sum(map(len, self._background.values()))
        return ExecutorStatistics(len(self._plan_runs), len(self._blocked), background, self._collectives.blocked)

    def _run(self, run: m.Run) -> None:
        plan = self._plans.get(run.plan)
        if plan is None:
            if run.session not in self._stores:
                self.reporter.report_dropped(run.sequence)
                return
            self._report(m.Failed(run.sequence, Status(Code.INTERNAL, f"plan {run.plan} is not on this host")))
            return
        plan_run = PlanRun(run, plan)
        if len(plan.segments) > 1:
            self._plan_runs[run.sequence] = plan_run
        self._add_unit(plan_run, run.sequence, run.segments)

    def _dispatch(self, dispatch: m.Dispatch) -> None:
        for sequence, segments in dispatch.units:
            plan_run = self._plan_runs.get(dispatch.run)
            if plan_run is None:  # the session has ended
                self.reporter.report_dropped(sequence)
            else:
                self._add_unit(plan_run, sequence, segments)

    def _add_unit(self, plan_run: PlanRun, sequence: int, segments: int) -> None:
        first, plan_run.segments = plan_run.segments, plan_run.segments + segments
        dispatched = plan_run.plan.segments[first : plan_run.segments]
        collective = dispatched[0].collective if segments == 1 else any(each.collective for each in dispatched)
        index = self._collectives.add() if collective else 0
        self._do_in_order(plan_run.run.session, DispatchUnit(plan_run, first, plan_run.segments, sequence, index))

    def _do_in_order(self, session: int, item: _Item) -> None:
        """Process an item, unless an earlier item of its session is blocked."""
        blocked = self._blocked.get(session)
        if blocked is None and self._do(item):
            return
        if blocked is None:
            blocked = self._blocked[session] = deque()
        blocked.append(item)
        if type(item) is DispatchUnit and item.collective_index:
            self._collectives.block(item.collective_index)

    def resume_blocked(self) -> None:
        """Process all blocked items that can be processed now."""
        progress = True
        while progress:
            progress = False
            for session, units in list(self._background.items()):
                left = [unit for unit in units if not self._advance(unit)]
                progress |= len(left) < len(units)
                self._background[session] = left
                if not left:
                    del self._background[session]
            for session, blocked in list(self._blocked.items()):
                while blocked and self._do(blocked[0]):
                    item = blocked.popleft()
                    if type(item) is DispatchUnit and item.collective_index:
                        self._collectives.unblock(item.collective_index)
                    progress = True
                if not blocked:
                    del self._blocked[session]

    def _do(self, item: _Item) -> bool:
        """Process an item and return True, or return False if it has to wait."""
        if type(item) is DispatchUnit:
            return self._advance(item)
        match item:
            case m.Free(session=session, handles=handles, delete=delete):
                store = self._stores.get(session)
                if store is not None and not delete:
                    store.forget(handles)
                elif store is not None:
                    with self._steps.deletions.lock:
                        for handle in handles:
                            store.delete(handle)
            case m.SpillRequest():
                self._spill_store.spill(item, self._stores.get(item.session))
            case m.DropFunction(function=function):
                self._steps.drop_function(function)
            case m.DropRun(run=run):
                self._plan_runs.pop(run, None)
            case m.CloseStore(session=session):
                # This is in order as well, so that no collective is dropped only on this host.
                self._stores.pop(session, None)
                self._inbox.drop_session(session)
                for unit in self._background.pop(session, ()):
                    self.reporter.report_dropped(unit.sequence)
                for run in [run for run, each in self._plan_runs.items() if each.run.session == session]:
                    del self._plan_runs[run]
                self._steps.release_memory()
        return True

    def _advance(self, unit: DispatchUnit) -> bool:
        """Run as many steps of the unit as possible. Return True if the unit is done or its run has failed."""
        plan_run = unit.plan_run
        run, plan = plan_run.run, plan_run.plan
        store = self._stores.get(run.session)
        if store is None:
            self.reporter.report_dropped(unit.sequence)
            return True
        if plan_run.failure is not None:
            self._skip(unit, plan_run.failure)
            return True
        if self.ended_runs and (status := self.ended_runs.take(unit.sequence)) is not None:
            self._fail(unit, store, status.within(plan.name))
            return True
        if unit.collective_index and not self._collectives.may_start(unit.collective_index):
            return False
        try:
            self._occupancy.executing = unit
            if not unit.started:
                unit.started = self._now()
            if plan_run.values is None:
                found = store.find(run.arguments)
                if found is None:
                    unit.started = 0
                    return False
                plan_run.values = dict(zip(plan.arguments, found, strict=True))
            unit.callbacks = self._steps.callbacks_of(plan.segments[unit.segment : unit.stop])
            may_wait = self._steps.may_wait
            while unit.segment < unit.stop:
                segment = plan.segments[unit.segment]
                while unit.position < len(segment.steps):
                    step = segment.steps[unit.position]
                    if may_wait and not self._steps.try_prepare(step, unit, self._wake):
                        unit.started = 0
                        return False
                    if isinstance(step, _RECEIVES) and not self._await_bytes(segment, unit):
                        unit.started = 0  # the wait does not count as time of the unit
                        return self._move_to_background(unit, store)
                    self._steps.run(step, unit)
                    unit.position += 1
                if segment.results:
                    handles = dict(zip(plan.results, run.results, strict=True))
                    values = plan_run.values
                    if unit.in_background:
                        for value in segment.results:
                            store.arrive(handles[value], values[value])
                    else:
                        store.set_all({handles[value]: values[value] for value in segment.results})
                for value in segment.drops:
                    plan_run.values.pop(value, None)
                unit.segment += 1
                unit.position = unit.arrived = 0
        except Exception as error:
            self._fail(unit, store, status_of_device_error(error).within(plan.name))
            return True
        finally:
            self._occupancy.executing = None
        if unit.stop == len(plan.segments):
            self._plan_runs.pop(run.sequence, None)
        if run.acknowledge:
            self._report(m.Enqueued(unit.sequence))
        self.reporter.watch(unit)
        return True

    def _move_to_background(self, unit: DispatchUnit, store: Store) -> bool:
        """Let the unit wait while its session continues, and return True. Return False if its session has to wait."""
        if unit.in_background or not unit.only_receives:
            return False
        unit.in_background = True
        run, plan = unit.plan_run.run, unit.plan_run.plan
        expected = {value for segment in plan.segments[unit.segment :] for value in segment.results}
        for value, handle in zip(plan.results, run.results, strict=True):
            if value in expected:
                store.expect(handle)
        self._background.setdefault(run.session, []).append(unit)
        return True

    def _fail(self, unit: DispatchUnit, store: Store, status: Status) -> None:
        run, plan = unit.plan_run.run, unit.plan_run.plan
        # Results of earlier segments may have been freed already.
        unmade = {value for segment in plan.segments[unit.segment :] for value in segment.results}
        set_result = store.arrive if unit.in_background else store.set
        for value, handle in zip(plan.results, run.results, strict=True):
            if value in unmade:
                set_result(handle, status)
        unit.plan_run.failure = status
        unit.plan_run.values = None
        self._leave(unit)
        self._steps.leave_out_calls(unit)
        self.reporter.start_reads(unit)  # which releases the memory that they hold
        self._report_failed(unit, status)

    def _skip(self, unit: DispatchUnit, failure: Status) -> None:
        """Skip a unit whose run has failed. Report it as failed if other hosts may wait in it for this one."""
        self._leave(unit)
        if self._steps.leave_out_calls(unit) or unit.collective_index:
            self._report_failed(unit, failure)
        else:
            self.reporter.report_dropped(unit.sequence)

    def _report_failed(self, unit: DispatchUnit, failure: Status) -> None:
        if unit.collective_index:
            self._collectives.skip(unit.sequence, unit.collective_index)
        self._report(m.Failed(unit.sequence, failure))

    def _leave(self, unit: DispatchUnit) -> None:
        """Forget a failed run with its last unit. Otherwise DropRun does that."""
        if unit.stop == len(unit.plan_run.plan.segments):
            self._plan_runs.pop(unit.plan_run.run.sequence, None)

    def _await_bytes(self, segment: p.Segment, unit: DispatchUnit) -> bool:
        """Await what the next step awaits, and steps behind it. Return whether it has arrived."""
        if unit.position < unit.arrived:
            return True
        run = unit.plan_run.run
        together = received_together(segment.steps, unit.position)
        feeds = [run.host_feeds + feed for step in together for feed in step.feeds]
        if self._inbox.await_all(run.session, feeds, self._wake, unit.sequence):
            unit.arrived = unit.position + len(together)
            return True
        self.reporter.start_reads(unit)  # other hosts may wait for them
        return False

    def _end_futures(self, outcome: Outcome) -> None:
        """Replace the futures in their buffers with the arrays, or store the failure."""
        unit, contents = outcome.unit, outcome.contents
        run, name = unit.plan_run.run, unit.plan_run.plan.name
        unit.futures -= 1
        try:
            if isinstance(contents, Status):
                contents.raise_if_error()
                raise AssertionError("an outcome without contents must be a failure")
            for (buffer, future, array), shards in zip(outcome.futures, contents, strict=True):
                made = self._steps.resolve_future(buffer, future, array, shards)
                unit.completions.append(ArrayCompletion(made, self._steps.deletions))
        except Exception as error:
            status = status_of_device_error(error)
            if not unit.callbacks:  # a client knows the name of its program
                status = status.within(name)
            store = self._stores.get(run.session)
            for buffer, future, _ in outcome.futures:
                future.fail(status)
                if store is not None:
                    store.fail(buffer, status)
            self._report(m.Failed(unit.sequence, status))
        else:
            if not unit.futures:
                self.reporter.watch(unit)


def received_together(steps: Sequence[p.Step], first: int) -> list[p.Receive | p.ReceiveRows]:
    """Return the step at position `first`, and those behind it that wait for other hosts together with it.

    A wait wakes the thread, so small arrays are awaited together. While a unit awaits pieces, the inbox has memory for
    them in any case, so this memory is bounded.
    """
    found: list[p.Receive | p.ReceiveRows] = []
    left = _TOGETHER_BYTES
    for step in islice(steps, first, None):
        if not isinstance(step, p.Receive):
            return found or ([step] if isinstance(step, p.ReceiveRows) else [])
        left -= step.nbytes
        if found and left < 0:
            break
        found.append(step)
    return found


def _only_reads(plan: p.Plan) -> bool:
    """Return whether all steps of the plan read arrays for the client. Other threads do the reads that have to wait."""
    return all(type(step) in _READS for segment in plan.segments for step in segment.steps)


class CollectiveOrder:
    """The order in which a host starts collectives: that of their arrival, as on all hosts of the island. Pure.

    Each collective has an index among all that have arrived, from 1 on.

    Invariant: no collective starts before an earlier one that waits for bytes on this host, or that this host skipped
    and that may have begun on other hosts. A host that waits in the skipped collective would mistake the later one for
    it, and end.
    """

    def __init__(self) -> None:
        self._count = 0
        self._blocked: set[int] = set()  # indices
        self._skipped: dict[int, int] = {}  # indices, by the sequence numbers of their units

    def add(self) -> int:
        """Count a collective, and return its index."""
        self._count += 1
        return self._count

    def block(self, index: int) -> None:
        """Make all later collectives wait for this one, which is blocked."""
        self._blocked.add(index)

    @property
    def blocked(self) -> int:
        """The number of blocked collectives."""
        return len(self._blocked)

    def unblock(self, index: int) -> None:
        """Unblock a collective that was started, dropped or skipped."""
        self._blocked.discard(index)

    def skip(self, sequence: int, index: int) -> None:
        """Make all later collectives wait until this one, which does not start here, has `ended` on all hosts."""
        self._skipped[sequence] = index

    def ended(self, sequence: int) -> bool:
        """Record that a unit has ended on all hosts. Return whether it was a collective that this host skipped."""
        return self._skipped.pop(sequence, None) is not None

    def may_start(self, index: int) -> bool:
        """Return whether the collective does not have to wait for an earlier one."""
        if not self._blocked and not self._skipped:  # nearly always
            return True
        return all(index <= each for each in chain(self._blocked, self._skipped.values()))
