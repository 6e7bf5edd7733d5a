"""End launches whose gangs have all ended: their results become ready or errors, and their credits return.

A launch ends once, with or without success: `failing_launches` makes it fail, and drops the gangs that have not
started. The others run to their ends, since hosts do not interrupt them.

Pure.
"""

from __future__ import annotations

from atoll.launch.control_flow_runs import ControlFlowRuns
from atoll.launch.large_launches import LARGE_NODES, LargeLaunches
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.state.buffer_states import BufferState
from atoll.state.launch_states import LaunchState
from atoll.state.session import Launch, Session


class LaunchEnds:
    """Ends the launches of all sessions, open or closed."""

    def __init__(
        self, shared: SharedState, parts: SharedParts, *, control_flow: ControlFlowRuns, large_launches: LargeLaunches
    ) -> None:
        self._sessions = shared.sessions
        self._resources = shared.resources
        self._reservations, self._buffers = parts.reservations, parts.buffers
        self._dependencies = parts.dependencies
        self._uses = parts.uses
        self._control_flow, self._large_launches = control_flow, large_launches

    def count_ended_gang(self, launch: Launch) -> None:
        """Count a gang of the launch that has ended, or that was dropped. The last one ends the launch."""
        launch.pending -= 1
        if not launch.pending:
            self.end(launch)
            if len(launch.program.nodes) > LARGE_NODES:
                self._large_launches.end(launch)
                return
            for node in launch.nodes:
                node.end()

    def end(self, launch: Launch) -> None:
        """Settle the results of a launch without further gangs: they are ready, or errors."""
        session, program, error = self._sessions.get(launch.session), launch.program, launch.error
        was_delegated = launch.state is LaunchState.DELEGATED
        launch.enter(LaunchState.ENDED)
        if error is not None or session is None:
            is_large = len(program.nodes) > LARGE_NODES  # `LargeLaunches` releases the others
            made = [entry for _, entry in launch.named_results()] if is_large else launch.entries[program.arguments :]
            for entry in made:
                self._reservations.release(entry)
        elif program.inner_values and not was_delegated and len(program.nodes) <= LARGE_NODES:
            for value in program.inner_values:
                self._reservations.release(launch.entries[value])
        if launch.dependency is not None:
            for node in launch.nodes:
                if node.dependency is not None:
                    self._dependencies.resolve(node.dependency)
        if session is None:
            return
        if error is not None and launch.hosts_started:
            self._free_results(session, launch)
        elif session.has_errors:
            self._free_lost_results(session, launch)
        self._buffers.settle_all(session, launch.results, error)
        if launch.credits:
            self._uses.return_credits(session, launch.credits)
        if launch.part_of is not None:
            self._control_flow.part_ended(launch)
        if launch.then is not None:
            launch.then(launch)

    def _free_results(self, session: Session, launch: Launch) -> None:
        """Have hosts forget the results of a launch that has failed, of which they may have made parts."""
        present, has_parts = session.directory.entries, len(launch.program.nodes) > 1
        made = [
            (handle, entry)
            for handle, entry in launch.named_results()
            if present.get(handle) is entry and (has_parts or len(entry.hosts) > 1)
        ]
        self._buffers.free_errors(session, made, self._lost_hosts(launch))

    def _free_lost_results(self, session: Session, launch: Launch) -> None:
        """Free results of a launch that have lost a part with an island, while the launch made others."""
        failed = BufferState.FAILED
        lost = [(handle, entry) for handle, entry in launch.named_results() if entry.state is failed and entry.blocks]
        for _, entry in lost:
            self._reservations.release(entry)
        if lost:
            self._buffers.free_errors(session, lost, self._lost_hosts(launch))

    def _lost_hosts(self, launch: Launch) -> list[int]:
        return [host for host in launch.hosts_started if self._resources.has_failed(host)]
