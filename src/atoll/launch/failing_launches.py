"""Fail launches: drop their gangs that have not started, and have hosts stop waiting for these.

The gangs of a failing launch that are in flight run to their ends, and then `launch_ends` ends the launch. `failures`
finds the launches that cannot end after a failure; other launches fail when a gang of theirs fails (`gang_ends`) or may
not start (`gang_starts`).

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.errors import Status
from atoll.launch.delegated_run_records import DelegatedRun
from atoll.launch.delegated_runs import DelegatedRuns
from atoll.launch.large_launches import LARGE_NODES
from atoll.launch.launch_ends import LaunchEnds
from atoll.launch.launch_feeds import LaunchFeeds
from atoll.launch.left_out_collectives import LeftOutCollectives
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.launch_states import LaunchState
from atoll.state.queued_nodes import Dropped
from atoll.state.session import GangRun, Launch

# Dropped nodes of a large launch that end in one step of a flush.
DROPPED_PER_STEP = 4


class FailingLaunches:
    """Makes launches fail."""

    def __init__(
        self,
        shared: SharedState,
        parts: SharedParts,
        *,
        feeds: LaunchFeeds,
        left_out: LeftOutCollectives,
        ends: LaunchEnds,
        delegated_runs: DelegatedRuns,
    ) -> None:
        self._resources = shared.resources
        self._sessions = shared.sessions
        self._outbox, self._remains = shared.outbox, shared.remains
        self._scheduler, self._sequential = parts.scheduler, parts.sequential
        self._reservations, self._buffers = parts.reservations, parts.buffers
        self._feeds, self._left_out = feeds, left_out
        self._uses, self._ends = parts.uses, ends
        self._delegated_runs = delegated_runs

    def fail(self, launch: Launch, status: Status) -> None:
        """Fail a launch: drop its gangs that have not started, and refuse its results to later launches.

        The dropped gangs of a large launch end over several flushes.
        """
        if launch.error is not None:
            return
        launch.error = status
        launch.enter(LaunchState.FAILING)
        session = self._sessions.get(launch.session)
        if session is not None:
            session.note_error(status)
            self._buffers.fail(session, launch.results, status)
        dropped = self._scheduler.drop_all(launch.nodes)
        self._reservations.dropped(dropped)
        self._stop_hosts(launch, dropped, status)
        delegated = self._delegated_runs.run_of(launch)
        if delegated is not None:
            for each in dropped:
                for gang in each.gangs:
                    self._delegated_runs.count_ended(gang)
            self._fail_delegated(delegated)
        if self._sequential is not None:
            for node in launch.nodes:
                self._sequential.finish(node)
        if session is not None and len(dropped) > LARGE_NODES:
            self._remains.release_in_steps(session, dropped, self.end_dropped, DROPPED_PER_STEP)
            return
        for each in dropped:
            self.end_dropped(each)

    def _stop_hosts(self, launch: Launch, dropped: Sequence[Dropped[GangRun]], status: Status) -> None:
        """Have hosts stop waiting for what a failing launch does not send or start any more."""
        for gang in [gang for node in launch.nodes for gang in node.gangs if not gang.is_over]:
            self._left_out.ended(gang.node)
            self._feeds.fail_incoming(gang, status)
        started = {host for host in launch.hosts_started if not self._resources.has_failed(host)}
        for each in dropped if started else ():
            for host in {host for gang in each.gangs for host in gang.run.spec.hosts} & started:
                self._outbox.to_host(host, m.DropRun(launch.session, launch.hosts_started[host]))
                started.discard(host)
            if not started:
                return

    def end_dropped(self, dropped: Dropped[GangRun]) -> None:
        """End gangs of a failing launch that were dropped. Its session may have ended meanwhile."""
        for gang in dropped.gangs:
            launch = gang.run.launch
            session = self._sessions.get(launch.session)
            self._left_out.ended(gang.node)
            if launch.error is not None:
                self._feeds.fail_incoming(gang, launch.error)
            self._uses.gang_left_line(gang)
            if session is not None:
                if launch.contents is None:
                    self._feeds.refuse(session, [gang.run.spec], launch.feeds, taken=True)
                self._buffers.drop_uses(session, gang)
            self._ends.count_ended_gang(launch)

    def _fail_delegated(self, run: DelegatedRun) -> None:
        """Have hosts drop the delegated run of a failing launch, and fail later runs that need its results."""
        others = self._delegated_runs.others(run)
        for other in others:
            arguments = other.launch.entries[: len(other.launch.arguments)]
            problem = next((entry.error for entry in arguments if entry.error), None)
            if problem is not None:
                self.fail(other.launch, problem)
        self._delegated_runs.launch_failed(run, others)
