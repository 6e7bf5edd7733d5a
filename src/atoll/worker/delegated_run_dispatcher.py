"""Dispatches the segments of delegated runs, which are launches whose segments the controller has granted all at once.

The dispatcher passes segments to the plan executor as the controller would: one unit after another, as earlier ones
end, with no more in flight than the controller would have started. It reports ended segments once per second, and when
the run is over. The controller may revoke a run at any segment (`RevokeRuns`, `SetRunLimit`), and then dispatches the
remaining segments itself.
"""

from __future__ import annotations

import enum
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from atoll.cluster.state_machine import StateMachine
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.state.device_clocks import DeviceClocks
from atoll.state.ended_gangs import EndedGangs
from atoll.state.host_window import BUSY_NS, NEW_NS, HostWindow
from atoll.state.tallies import computes

_HERE, _DEVICES = (0,), {0: (0,)}
# Interval of reports about longer runs, whose use is charged at each report.
_REPORT_NS = 1_000_000_000


class DelegatedRunState(enum.IntEnum):
    """The state of a delegated run on this host."""

    GRANTED = 0  # its segments up to its limit may start
    AWAITS_LIMIT = 1  # nothing starts until the controller has sent its limit
    DROPPED = 2  # failed, or its launch or session has ended: nothing starts, and segments in flight end


_S = DelegatedRunState
# The states that may follow each state. The comments name the messages that cause the transitions.
TRANSITIONS: dict[DelegatedRunState, frozenset[DelegatedRunState]] = {
    # `RevokeRuns`, or `DropRun` of an earlier run; `Failed`, `DropRun`, `CloseStore`
    _S.GRANTED: frozenset({_S.AWAITS_LIMIT, _S.DROPPED}),
    # `SetRunLimit`; `Failed`, `DropRun`, `CloseStore`
    _S.AWAITS_LIMIT: frozenset({_S.GRANTED, _S.DROPPED}),
    _S.DROPPED: frozenset(),
}


@dataclass(slots=True, eq=False)
class HostRun(StateMachine[DelegatedRunState]):
    """A delegated run on this host."""

    transitions = TRANSITIONS
    message: m.Run
    plan: p.Plan
    computing: list[int]  # number of computing segments before each segment, and in the plan
    expected: list[int]  # duration of each segment, in nanoseconds
    limit: int  # segments that are dispatched here
    started: int = 0  # segments that have been dispatched
    state: DelegatedRunState = DelegatedRunState.GRANTED
    open: dict[int, int] = field(default_factory=dict)  # segments in flight, in order, with their expected durations
    times: list[int] = field(default_factory=list)  # starts and ends of segments from `first` on, or 0
    first: int = 0  # first segment that is not reported yet
    ended: EndedGangs | None = None  # since the last report
    reported: int = 0  # time of the last report, or of the beginning

    def _described(self) -> str:
        return f"delegated run {self.message.sequence}"

    def await_limit(self) -> None:
        """Start no further segment until the controller has sent the limit."""
        if self.state is not DelegatedRunState.AWAITS_LIMIT:
            self.enter(DelegatedRunState.AWAITS_LIMIT)
        self.limit = self.started

    def drop(self) -> None:
        """Start no further segment."""
        self.enter(DelegatedRunState.DROPPED)
        self.limit = self.started

    def take_progress(self, is_over: bool) -> m.RunProgress:
        """Return the report about progress since the last one."""
        stop = 2 * (next(iter(self.open), self.started) - self.first)
        times, self.times = self.times[:stop], self.times[stop:]
        ended = None if self.ended is None else self.ended.counted()
        message = m.RunProgress(self.message.sequence, self.first, struct.pack(f"<{stop}q", *times), ended, is_over)
        self.first += stop // 2
        self.ended = None
        return message

    def sequence(self, segment: int) -> int:
        segments = self.plan.segments
        return self.message.sequence + segments[segment].gang - segments[0].gang

    def computes(self, segment: int) -> bool:
        return self.computing[segment + 1] > self.computing[segment]


class UnitsEnded(msgspec.Struct, frozen=True):
    """Reports about units of delegated runs, made on any thread. Empty if bytes have arrived that a run awaits."""

    messages: tuple[Any, ...]


class DelegatedUnits:
    """The units of delegated runs that are in flight. Safe to use from any thread.

    `report` receives the reports of the executor and its watchers. Reports about units of delegated runs are passed to
    `DelegatedRunDispatcher.handle` through `to_dispatcher`, and others are sent to the controller.
    """

    def __init__(self, to_controller: Callable[..., None], to_dispatcher: Callable[[UnitsEnded], None]) -> None:
        # With their segments, by sequence. Only the executor's thread changes it.
        self.in_flight: dict[int, tuple[HostRun, int]] = {}
        self.to_controller = to_controller
        self.to_dispatcher = to_dispatcher

    def report(self, *messages: Any) -> None:
        if not self.in_flight:  # nearly always, and this is on the path of every unit
            for message in messages:
                self.to_controller(message)
            return
        own: list[Any] = []
        for message in messages:
            if type(message) is m.Done:
                runs = [each for each in message.runs if each[0] in self.in_flight]
                if runs:
                    own.append(m.Done(tuple(runs)))
                    left = tuple(each for each in message.runs if each[0] not in self.in_flight)
                    if left:
                        self.to_controller(m.Done(left))
                    continue
            elif type(message) is m.Failed and message.sequence in self.in_flight:
                own.append(message)
                continue
            self.to_controller(message)
        if own:
            self.to_dispatcher(UnitsEnded(tuple(own)))

    def gang_of(self, sequence: int) -> int:
        """Return the sequence number by which the controller knows the unit."""
        found = self.in_flight.get(sequence)
        return sequence if found is None else found[0].message.sequence

    def units_of(self, gang: int) -> list[int]:
        """Return the units in flight that belong to this gang of the controller."""
        own = [sequence for sequence, (run, _) in list(self.in_flight.items()) if run.message.sequence == gang]
        return own or [gang]


_HANDLED = frozenset(
    (UnitsEnded, m.Run, m.RevokeRuns, m.SetRunLimit, m.RegisterPlan, m.DropPlan, m.DropRun, m.CloseStore)
)


class DelegatedRunDispatcher:
    """Dispatches the segments of delegated runs. Used on the executor's thread.

    Args:
        units: Records the units in flight, and receives their reports.
        execute: Handles the messages that remain, as `PlanExecutor.handle` does.
        await_feeds: Waits for bytes, as `Inbox.await_all` does.
        now: The clock of `Done`.
    """

    def __init__(
        self,
        units: DelegatedUnits,
        execute: Callable[[Any], None],
        await_feeds: Callable[[int, list[int], Callable[[], None], int], bool],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._execute = execute
        self._await_feeds = await_feeds
        self._to_controller = units.to_controller
        self._submit = units.to_dispatcher
        self._now = now
        self._plans: dict[int, tuple[p.Plan, list[int], list[int]]] = {}  # plan, computing and expected of `HostRun`
        self._runs: dict[int, HostRun] = {}  # by sequence, in order
        self._units = units.in_flight
        self._window = HostWindow()  # units in flight; transfers weigh nothing, since they run beside computations
        self._last_end = 0  # time at which a unit ended last
        self._clocks = DeviceClocks()  # of one device, which stands for all devices of the units

    def handle(self, message: Any) -> None:
        """Handle a message of the executor's thread, and forward it unless it is for a delegated run."""
        kind = type(message)
        if kind not in _HANDLED or (kind is m.Run and not (message.ahead and message.plan in self._plans)):
            self._execute(message)  # first, since these are most messages
        elif kind is m.Run:
            self._runs[message.sequence] = HostRun(message, *self._plans[message.plan], message.segments)
            self._dispatch(message.session)
        elif kind is UnitsEnded:
            for each in message.messages:
                self._ended(each)
            if not message.messages:  # bytes have arrived
                for session in list({run.message.session: None for run in self._runs.values()}):
                    self._dispatch(session)
        elif kind is m.RevokeRuns:
            self._revoke(message.session)
        elif kind is m.SetRunLimit:
            for sequence, limit in message.runs:
                run = self._runs.get(sequence)
                # It may have been dropped meanwhile.
                if run is not None and run.state is DelegatedRunState.AWAITS_LIMIT:
                    run.enter(DelegatedRunState.GRANTED)
                    run.limit = limit
            self._continue(message.session)
        elif kind is m.RegisterPlan:
            segments = message.definition.segments
            self._plans[message.plan] = (
                message.definition,
                list(accumulate(map(_computes, segments), initial=0)),
                [NEW_NS] * len(segments),
            )
            self._execute(message)
        elif kind is m.DropPlan:
            self._plans.pop(message.plan, None)
            self._execute(message)
        elif kind is m.DropRun:
            self._drop([self._runs[message.run]] if message.run in self._runs else [], message)
        elif kind is m.CloseStore:
            self._drop(self._of(message.session), message)

    def _drop(self, runs: list[HostRun], message: Any) -> None:
        """Drop runs. Later runs of the session may need their results, so these await the controller's decision."""
        left = [run for run in runs if run.state is not DelegatedRunState.DROPPED]
        for run in self._of(message.session) if left else ():
            if run in left:
                run.drop()
            elif not run.started and run.state is not DelegatedRunState.DROPPED:
                run.await_limit()
        self._execute(message)
        self._continue(message.session)

    def _of(self, session: int) -> list[HostRun]:
        return [run for run in self._runs.values() if run.message.session == session]

    def _continue(self, session: int) -> None:
        """Start the segments that fit, and send the reports that are due.

        Runs end in order, because a run reserves only the memory that it needs beyond that of the run before it.
        """
        self._dispatch(session)
        runs = self._of(session)
        for run in runs:
            is_first = next(each for each in runs if each.message.sequence in self._runs) is run
            has_ended = run.started == run.limit and not run.open and run.state is not DelegatedRunState.AWAITS_LIMIT
            is_over = is_first and has_ended
            if is_over:
                del self._runs[run.message.sequence]
            elif run.ended is None or self._now() - run.reported < _REPORT_NS:
                continue
            run.reported = self._now()
            self._to_controller(run.take_progress(is_over))

    def _dispatch(self, session: int) -> None:
        before = -1  # computing segments of earlier runs since the first that has not ended; -1 if all have
        for run in self._of(session):
            while run.started < run.limit and self._can_start_next(run, before):
                self._start(run)
            if run.started < run.limit:
                return
            if before >= 0 or run.open:
                before = self._computing_since(run, before)

    def _can_start_next(self, run: HostRun, before: int) -> bool:
        if not self._is_ready(run):
            return False
        if run.computes(run.started):
            return self._computing_since(run, before) < run.message.ahead and not self._window.is_busy()
        # A transfer between two computing segments waits for the first, and must not delay the dispatch of the second.
        transfers = len(self._units) - self._window.in_flight
        return self._window.busy_ns < BUSY_NS or transfers < run.message.ahead

    def _is_ready(self, run: HostRun) -> bool:
        """Return whether the next segment has its bytes, because a segment that waits for bytes cannot be revoked."""
        steps = run.plan.segments[run.started].steps
        if not steps or type(steps[0]) is not p.Receive:
            return True
        message, sequence = run.message, run.sequence(run.started)
        feeds = [message.host_feeds + feed for feed in steps[0].feeds]
        return self._await_feeds(message.session, feeds, self._wake, sequence)

    def _wake(self) -> None:
        self._submit(UnitsEnded(()))

    def _computing_since(self, run: HostRun, before: int) -> int:
        """Return the number of computing segments from the session's first open one to the run's newest one."""
        if before >= 0:
            return before + run.computing[run.started]
        return run.computing[run.started] - run.computing[next(iter(run.open), run.started)]

    def _start(self, run: HostRun) -> None:
        segment, message = run.started, run.message
        sequence = run.sequence(segment)
        expected = run.open[segment] = run.expected[segment]
        run.times += (0, 0)
        self._window.start(run.computes(segment), expected)
        self._units[sequence] = run, segment
        run.started += 1
        if segment:
            self._execute(m.Dispatch(message.session, message.sequence, ((sequence, 1),)))
        else:
            run.reported = self._now()  # not at its arrival, because it may have waited long for an earlier run
            self._execute(msgspec.structs.replace(message, segments=1, ahead=0))

    def _take(self, sequence: int) -> tuple[HostRun, int]:
        """Remove a unit that was in flight, and return its run and segment."""
        run, segment = self._units.pop(sequence)
        self._window.end(run.computes(segment), run.open.pop(segment))
        return run, segment

    def _ended(self, message: m.Done | m.Failed) -> None:
        if isinstance(message, m.Failed):
            run, _ = self._take(message.sequence)
            self._to_controller(m.Failed(run.message.sequence, message.status))
            self._drop([run], m.DropRun(run.message.session, run.message.sequence))
            return
        for sequence, started, ended in message.runs:
            run, segment = self._take(sequence)
            place = 2 * (segment - run.first)
            run.times[place : place + 2] = started, ended
            if run.ended is None:
                run.ended = EndedGangs(started, self._last_end)
            took, _ = self._clocks.ended(_HERE, _DEVICES, (started, ended), run.computes(segment))
            run.expected[segment] = took
            self._last_end = max(self._last_end, ended)
            run.ended.add(segment, self._last_end, took, segment in run.message.sampled)
            self._continue(run.message.session)

    def _revoke(self, session: int) -> None:
        runs = [run for run in self._of(session) if run.state is not DelegatedRunState.DROPPED]
        for run in runs:
            run.await_limit()
            if run.ended is not None:  # the controller charges later ends to the session
                run.reported = self._now()
                self._to_controller(run.take_progress(is_over=False))
        self._to_controller(m.RunsRevoked(session, tuple((run.message.sequence, run.started) for run in runs)))


def _computes(segment: p.Segment) -> bool:
    """Return whether the segment computes, by the rule that the controller uses for its gang."""
    steps = segment.steps
    return bool(steps) and computes(p.STEP_KINDS[type(steps[-1])], any(type(step) is p.Execute for step in steps))
