"""Start gangs: take them from the scheduler in its order, and send them to their hosts.

The inputs of a gang were checked when its launch arrived, and are checked again before it starts. Dispatch is parallel:
the gangs of a node are started before their inputs have been computed, and workers wait for data from other hosts.
`launch.sequential` has the alternative.

Pure.
"""

from __future__ import annotations

from atoll.errors import Code, Status
from atoll.launch.delegated_runs import DelegatedRuns
from atoll.launch.failing_launches import FailingLaunches
from atoll.launch.launch_checks import gang_problem
from atoll.launch.run_messages import RunMessages
from atoll.launch.run_revocations import RunRevocations
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.state.gang_states import GangState
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun, Session


class GangStarts:
    """Starts gangs, and puts them into `in_flight`, by sequence."""

    def __init__(
        self,
        shared: SharedState,
        parts: SharedParts,
        *,
        failing: FailingLaunches,
        delegated_runs: DelegatedRuns,
        revocations: RunRevocations,
    ) -> None:
        self._sessions = shared.sessions
        self._outbox = shared.outbox
        self._scheduler, self._sequential = parts.scheduler, parts.sequential
        self._reservations, self._buffers, self._charges = parts.reservations, parts.buffers, parts.charges
        self._in_flight = parts.in_flight
        self._uses, self._failing = parts.uses, failing
        self._delegated_runs, self._revocations = delegated_runs, revocations
        self._run_messages = RunMessages(shared.outbox, acknowledged=shared.settings.sequential)

    def start_ready(self) -> None:
        """Start the gangs that islands can take now."""
        scheduler = self._scheduler
        touched = scheduler.touched
        if scheduler.contended:
            self._revocations.revoke_contended()
        if not touched:
            return
        reserve, line_up_instead = self._reservations.reserve, self._delegated_runs.line_up_instead
        while touched:
            for island in sorted(touched):  # any order is correct, but the event log must replay
                touched.discard(island)
                while (gang := scheduler.start_next(island, reserve, line_up_instead)) is not None:
                    self._start(gang)
        self._run_messages.forget_newest()

    def _start(self, gang: Gang[GangRun]) -> None:
        """Send a gang, and the others of its node if these start together, unless its launch has a problem."""
        node, launch = gang.node, gang.run.launch
        gangs = node.gangs if node.starts_together else (gang,)
        session = self._sessions.get(launch.session)
        problem = None
        for each in gangs:
            problem = problem or gang_problem(session, each)
        if problem is not None or session is None:
            for each in gangs:
                self._scheduler.finished(each)
            self._failing.fail(launch, problem or Status(Code.CANCELLED))
            return
        if self._reservations.ledger.is_tight:
            self.publish_frees()
        for each in gangs:
            self._send(session, each)

    def _send(self, session: Session, gang: Gang[GangRun]) -> None:
        """Send a gang of the session to its hosts."""
        node, run, now = gang.node, gang.run, self._outbox.seconds
        run.waited = node.waited_until(now)
        gang.started_at = now
        self._in_flight[gang.sequence] = gang
        if node.is_delegated:
            self._delegated_runs.start(gang)
            return
        gang.enter(GangState.RUNNING)
        self._charges.started(gang, now - run.launch.seconds)
        self._run_messages.send(gang)
        if self._sequential is not None:
            self._sequential.started(gang, len(run.spec.hosts))
        self._uses.gang_left_line(gang)
        self._buffers.drop_uses(session, gang)

    def publish_frees(self) -> None:
        """Send the pending frees to the hosts, before later messages."""
        self._outbox.flush_frees()
        self._reservations.ledger.frees_published()
