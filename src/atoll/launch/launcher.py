"""Launch programs: for clients, for control flow, and for the controller itself.

A launch is checked when it arrives. If it cannot run, its results are errors. Otherwise it is made
(`launch_builder`), put in line (`launch_queue`) or delegated to its hosts (`delegated_runs`), and the gangs that can
start are started (`gang_starts`). `launches` lists the other parts of a launch's life.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.errors import Status
from atoll.launch.control_flow_launches import ControlFlowLaunches
from atoll.launch.delegated_runs import DelegatedRuns
from atoll.launch.gang_starts import GangStarts
from atoll.launch.large_launches import LARGE_NODES, LargeLaunches
from atoll.launch.launch_checks import MAX_BYTES, check_window, launch_problem, size_problem
from atoll.launch.launch_feeds import LaunchFeeds
from atoll.launch.launch_queue import LaunchQueue
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Entry
from atoll.state.buffer_states import BufferState
from atoll.state.launch_states import LaunchState
from atoll.state.programs import RegisteredProgram
from atoll.state.session import Launch, Session


class Launcher:
    """Makes the launches of programs and control flow nodes."""

    def __init__(
        self,
        shared: SharedState,
        parts: SharedParts,
        *,
        feeds: LaunchFeeds,
        queue: LaunchQueue,
        starts: GangStarts,
        large_launches: LargeLaunches,
        control_flow: ControlFlowLaunches,
        delegated_runs: DelegatedRuns,
    ) -> None:
        self._is_sequential = shared.settings.sequential
        self._resources = shared.resources
        self._outbox = shared.outbox
        self._quarantine = shared.quarantine
        self._offenses = shared.offenses
        self._builder, self._buffers, self._feeds = parts.builder, parts.buffers, feeds
        self._dependencies = parts.dependencies
        self._queue, self._starts = queue, starts
        self._large_launches, self._control_flow = large_launches, control_flow
        self._delegated_runs = delegated_runs

    def launch_within_window(self, session: Session, message: m.Launch) -> None:
        """Launch a program as `launch` does. Raise INVALID_ARGUMENT if the proxy exceeds its session's window."""
        check_window(session, message)
        self.launch(session, message)
        if not session.in_steps:
            self._buffers.launched(session, message)

    def launch(self, session: Session, message: m.Launch, then: Callable[[Launch], None] | None = None) -> None:
        """Launch a program with new handles for its results. If it cannot run, the results are errors.

        `then` is called at the end of the launch if it can run.
        """
        session.credits += message.credits
        problem = self._offenses.launch_problem(session.tenant, self._outbox.seconds)
        if problem is None and session.directory.nbytes > MAX_BYTES:
            problem = size_problem(session.directory.nbytes)
        program = session.programs.get(message.program)
        if program is None and message.program in session.control_flow:
            self._launch_control_flow(session, message, problem)
            return
        if problem is None:
            problem = launch_problem(session, program, message, self._quarantine, self._resources)
        if problem is not None:
            self._refuse(session, program, message, problem)
            return
        assert isinstance(program, RegisteredProgram)
        session.count_launch()
        if self._launch_program(session, program, message, then):
            self._starts.start_ready()

    def _launch_control_flow(self, session: Session, message: m.Launch, problem: Status | None) -> None:
        """Launch a control flow node, or refuse the launch because of the problem, if there is one."""
        if problem is None:
            problem = self._control_flow.launch(session, message)
        if problem is not None:
            self._refuse(session, None, message, problem)
            return
        session.count_launch()
        self._starts.start_ready()

    def _refuse(
        self, session: Session, program: RegisteredProgram | Status | None, message: m.Launch, problem: Status
    ) -> None:
        """Make errors of the results of a launch that cannot run, and drop the bytes that its client sends."""
        session.note_error(problem)
        for handle in message.results:
            session.directory.add(handle, Entry((), 0, BufferState.FAILED, problem))
        if isinstance(program, RegisteredProgram) and message.contents is None:
            self._feeds.refuse(session, program.gangs, message.feeds)
        session.credits -= message.credits
        self._outbox.return_credits(session.number, message.credits)

    def _launch_program(
        self,
        session: Session,
        program: RegisteredProgram,
        message: m.Launch,
        then: Callable[[Launch], None] | None,
    ) -> bool:
        """Put the gangs of a program in line. Return False if the program is large: its gangs follow in steps."""
        self._queue.restore_spilled(session, message)
        is_plain = not self._is_sequential and not self._dependencies.has_some(session.number)
        delegated = self._delegated_runs.program_of(session, program) if is_plain else None
        if delegated is not None:
            state = LaunchState.DELEGATED
        else:
            state = LaunchState.BEGINNING if len(program.nodes) > LARGE_NODES else LaunchState.ACTIVE
        launch = self._builder.launch(session, program, message, self._outbox.seconds, state)
        launch.then = then
        if state is LaunchState.BEGINNING:
            self._large_launches.begin(session, launch, message)
            return False
        if delegated is not None:
            self._delegated_runs.line_up(session, launch, delegated)
        else:
            self._queue.line_up(session, launch)
        self._queue.limit_rate(session, launch)
        return True

    def launch_to_restore(self, session: Session, message: m.Launch, then: Callable[[Launch], None]) -> Launch:
        """Launch a program that makes spilled arrays again, under their existing handles. Call `then` at its end."""
        program = session.programs[message.program]
        assert isinstance(program, RegisteredProgram)
        session.credits += message.credits
        session.count_launch()
        self._queue.restore_spilled(session, message)
        launch = self._builder.launch(session, program, message, self._outbox.seconds, results_exist=True)
        launch.then = then
        for value in program.result_values:
            launch.entries[value].hosts = program.values[value - program.arguments].hosts
        self._queue.line_up(session, launch)
        return launch
