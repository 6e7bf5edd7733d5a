"""All launches that have not ended, from a client's request to gangs in line, to messages to hosts, and to their ends.

`SharedParts` has the parts that most others use. `Launches` makes the others, which have one of these subjects each,
and connects them:

- A launch arrives: `launcher`. It is put in line: `launch_queue`; in steps: `large_launch_steps`.
- Its gangs start: `gang_starts`; or the launch is delegated: `delegated_runs`.
- Its gangs end: `gang_ends`. It ends with the last of them: `launch_ends`.
- It fails: `failing_launches`.

`gang_states` and `launch_states` have all states. A part uses only parts that are made before it.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.errors import Code, Status
from atoll.launch.control_flow_launches import ControlFlowLaunches
from atoll.launch.control_flow_runs import ControlFlowRuns
from atoll.launch.deferred_results import DeferredResults
from atoll.launch.delegated_runs import DelegatedRuns
from atoll.launch.failing_launches import FailingLaunches
from atoll.launch.gang_charges import GangRecorder
from atoll.launch.gang_ends import GangEnds
from atoll.launch.gang_starts import GangStarts
from atoll.launch.large_launch_steps import LargeLaunchSteps
from atoll.launch.large_launches import LargeLaunches
from atoll.launch.launch_ends import LaunchEnds
from atoll.launch.launch_feeds import LaunchFeeds
from atoll.launch.launch_queue import LaunchQueue
from atoll.launch.launch_validation import validate_launches
from atoll.launch.launcher import Launcher
from atoll.launch.left_out_collectives import LeftOutCollectives
from atoll.launch.policy import Policy
from atoll.launch.requeued_launches import RequeuedLaunches
from atoll.launch.run_revocations import RunRevocations
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import LaunchServices, SharedState
from atoll.state.gang_states import GangState
from atoll.state.queued_nodes import Dropped
from atoll.state.session import GangRun, Session

# Buffers of a closed session, or on a lost island, that are released in one step of a flush.
ENTRIES_PER_STEP = 4


class Launches:
    """The parts of the life of launches, and what concerns several of them.

    Args:
      trace: records the ends of gangs.
      policy: makes the scheduling policy of an island.
    """

    def __init__(
        self,
        shared: SharedState,
        services: LaunchServices,
        *,
        trace: GangRecorder,
        policy: Callable[[], Policy],
    ) -> None:
        parts = SharedParts.of(shared, services, trace, policy)
        self._resources = shared.resources
        self._sessions = shared.sessions
        self.remains = shared.remains
        self.in_flight = parts.in_flight
        self.scheduler = parts.scheduler
        self.reservations = parts.reservations
        self.charges = parts.charges
        self.large_plans = parts.large_plans
        self.buffers = parts.buffers
        self.builder = parts.builder
        self._sequential, self._dependencies, self._uses = parts.sequential, parts.dependencies, parts.uses
        self.left_out = LeftOutCollectives(self.in_flight, shared.outbox)
        self.feeds = LaunchFeeds(shared, self.scheduler)
        self.deferred_results = DeferredResults(self._dependencies, self.buffers, shared.outbox)
        self.requeued = RequeuedLaunches(shared, parts)
        self.control_flow_runs = ControlFlowRuns(shared, parts)
        self.large_launches = LargeLaunches(self.reservations, shared.discards)
        self._ends = LaunchEnds(shared, parts, control_flow=self.control_flow_runs, large_launches=self.large_launches)
        self.delegated_runs = DelegatedRuns(shared, parts, ends=self._ends)
        self.failing = FailingLaunches(
            shared,
            parts,
            feeds=self.feeds,
            left_out=self.left_out,
            ends=self._ends,
            delegated_runs=self.delegated_runs,
        )
        self.revocations = RunRevocations(shared, parts, delegated_runs=self.delegated_runs, failing=self.failing)
        self.gang_starts = GangStarts(
            shared,
            parts,
            failing=self.failing,
            delegated_runs=self.delegated_runs,
            revocations=self.revocations,
        )
        self.gang_ends = GangEnds(
            shared,
            parts,
            left_out=self.left_out,
            ends=self._ends,
            failing=self.failing,
            delegated_runs=self.delegated_runs,
        )
        self.queue = LaunchQueue(shared, parts, ends=self._ends)
        self.large_launch_steps = LargeLaunchSteps(
            shared, parts, queue=self.queue, failing=self.failing, launches=self.large_launches
        )
        self.control_flow = ControlFlowLaunches(shared, parts, runs=self.control_flow_runs, queue=self.queue)
        self.launcher = Launcher(
            shared,
            parts,
            feeds=self.feeds,
            queue=self.queue,
            starts=self.gang_starts,
            large_launches=self.large_launches,
            control_flow=self.control_flow,
            delegated_runs=self.delegated_runs,
        )

    def parts(self) -> dict[str, Any]:
        """Return the parts that have state, by the names that dumps use."""
        found = {
            "launcher": self,
            "failing launches": self.failing,
            "scheduler": self.scheduler,
            "reservations": self.reservations,
            "memory": self.reservations.ledger,
            "memory waits": self.reservations.waits,
            "gang charges": self.charges,
            "device clocks": self.charges.clocks,
            "dependencies": self._dependencies,
            "large plans": self.large_plans,
            "launch builder": self.builder,
            "large launches": self.large_launches,
            "control flow": self.control_flow_runs,
            "delegated runs": self.delegated_runs,
        }
        return found if self._sequential is None else found | {"sequential dispatch": self._sequential}

    def island_restarted(self, island: int) -> None:
        """Resume an island whose hosts have restarted, with nothing on them and with new clocks."""
        for host in self._resources.hosts_of(island):
            self.charges.host_restarted(host)
        self.scheduler.offer_again(island)

    def validate(self) -> None:
        """Raise AssertionError if states contradict what is counted. For tests, since it looks at all launches."""
        validate_launches(self.scheduler, self.in_flight, self.charges, self.left_out, self._sessions)
        self.delegated_runs.validate()

    # ---- the end of a session

    def session_closed(self, session: Session) -> None:
        """Drop the gangs of the session that have not started, and release its memory."""
        self.control_flow_runs.session_closed(session.number)
        session.tenant.ended(session.in_flight)
        self._dependencies.forget(session.number)
        if self._sequential is not None:
            self._sequential.forget(session.number)
        nodes = self.scheduler.drop_session(session.number)
        self.reservations.dropped(nodes)
        later = [dropped for dropped in nodes if not dropped.node.is_delegated]
        for dropped in nodes:
            if dropped.node.is_delegated:
                self.end_dropped(dropped)
        self.remains.release_in_steps(session, later, self.end_dropped)
        for gang in self.delegated_runs.session_closed(session.number):
            self.feeds.fail_incoming(gang, _ended(session.number))  # its hosts stop, each at a different place
        # After the nodes, since dropped nodes return the memory that they have inherited from these entries.
        self.remains.release_in_steps(session, session.directory.entries, self.reservations.release, ENTRIES_PER_STEP)

    def end_dropped(self, dropped: Dropped[GangRun]) -> None:
        """End the gangs of a closed session's node that were dropped."""
        node = dropped.node
        self.left_out.ended(node)
        for gang in node.gangs:
            if gang.state is not GangState.DROPPED:
                self.feeds.fail_incoming(gang, _ended(node.session))  # from the parts that will not start
        for gang in dropped.gangs:
            self._uses.gang_left_line(gang)
            if node.is_delegated:
                self.delegated_runs.count_ended(gang)
            self._ends.count_ended_gang(gang.run.launch)


def _ended(session: int) -> Status:
    return Status(Code.CANCELLED, f"session {session} has ended")
