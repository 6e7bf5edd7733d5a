"""Put large launches in line, over several flushes.

There are three stages: make the entries of the values, make the queued nodes, which are deferred, and enqueue these in
order. Each flush does a part of a stage for one launch.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.launch.failing_launches import FailingLaunches
from atoll.launch.large_launches import LargeLaunch, LargeLaunches
from atoll.launch.launch_checks import program_problem
from atoll.launch.launch_queue import LaunchQueue
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.state.dispatch_units import Unit
from atoll.state.launch_states import LaunchState
from atoll.state.session import Launch, Session
from atoll.state.session_states import SessionState
from atoll.state.stepped_work import TurnFailedError


class LargeLaunchSteps:
    """Does the steps that put large launches in line.

    `lines` is the scheduler, or sequential dispatch in front of it.
    """

    def __init__(
        self,
        shared: SharedState,
        parts: SharedParts,
        *,
        queue: LaunchQueue,
        failing: FailingLaunches,
        launches: LargeLaunches,
    ) -> None:
        self._resources = shared.resources
        self._quarantine = shared.quarantine
        self._scheduler, self._lines = parts.scheduler, parts.lines
        self._builder, self._buffers = parts.builder, parts.buffers
        self._queue, self._failing = queue, failing
        self._launches = launches

    def proceed(self, steps: int) -> None:
        """Do `steps` steps for one launch. A bug in them is reported as `TurnFailedError`, and ends the session."""
        each = self._launches.next()
        if each is None:
            return
        session = each.session
        is_open = session.state is not SessionState.CLOSED
        try:
            is_over = not is_open or self._proceed(each, steps)
        except Exception as error:
            raise TurnFailedError(session=session.number) from error
        if is_over:
            self._launches.remove(each)
            if is_open:
                session.in_steps -= 1
                self._buffers.unuse(session, each.launch.arguments)
                self._buffers.launched(session, each.message)

    def _proceed(self, each: LargeLaunch, steps: int) -> bool:
        """Do steps for a launch that begins. Return whether it is in line, or has failed."""
        session, launch, builder = each.session, each.launch, self._builder
        if launch.error is not None:  # its nodes were dropped
            return True
        if each.values < len(launch.program.values):
            first = launch.program.arguments + each.values
            each.values = min(each.values + 2 * steps, len(launch.program.values))
            stop = launch.program.arguments + each.values
            builder.make_entries(session, launch, each.message.traceback_id, range(first, stop))
            return False
        units = launch.program.units
        if each.units is None:
            if units.form(steps):
                each.units = units.units(may_join=builder.may_join(session, launch.program))
            return False
        if each.joined is None:
            made = len(launch.nodes)
            for unit in each.units[made : made + steps]:
                builder.make_node(session, launch, unit, -1)
                self._scheduler.defer(launch.nodes[-1], own=True)
            if len(launch.nodes) == len(each.units):
                each.joined = 0
                return not self._nodes_made(session, launch, each.units)
            return False
        some = launch.nodes[each.joined : each.joined + steps]
        each.joined += len(some)
        for node in some:
            if node.is_pending:
                self._lines.enqueue(node)
        return each.joined >= len(launch.nodes)

    def _nodes_made(self, session: Session, launch: Launch, units: Sequence[Unit]) -> bool:
        """Activate a launch whose nodes are all made. Return whether they join their lines now.

        Meanwhile the launch may have become impossible, and then it fails.
        """
        program = launch.program
        problems = (session.directory.problem(handle) for handle in launch.arguments)
        problem = next((each for each in problems if each is not None), None)
        problem = problem or program_problem(session, program, self._quarantine, self._resources)
        if problem is not None:
            self._failing.fail(launch, problem)
            return False
        launch.enter(LaunchState.ACTIVE)
        for i in program.donated:
            launch.entries[i].consume()
        self._queue.order_by_dependencies(launch, units)
        self._queue.limit_rate(session, launch)
        return launch.dependency is None
