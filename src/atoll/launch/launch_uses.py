"""The credits and programs that launches use, and return when they have ended or are not in line any more.

Pure.
"""

from __future__ import annotations

from atoll.launch.shared_state import LaunchServices, SharedState
from atoll.state.programs import RegisteredProgram
from atoll.state.queued_nodes import Gang, HostCallKind
from atoll.state.session import GangRun, Session


class LaunchUses:
    """Returns credits to sessions, and drops released programs that no gang waits for."""

    def __init__(self, shared: SharedState, services: LaunchServices) -> None:
        self._sessions = shared.sessions
        self._outbox = shared.outbox
        self._services = services

    def return_credits(self, session: Session, credits: int) -> None:
        """Return the credits of a client's launch that has ended."""
        session.launch_ended(credits)
        self._outbox.return_credits(session.number, credits, may_wait=session.credits > 0)

    def gang_left_line(self, gang: Gang[GangRun]) -> None:
        """Note that a gang has started, or was dropped."""
        run = gang.run
        program = run.launch.program
        if run.spec.host_call is HostCallKind.PYTHON:
            session = self._sessions.get(run.launch.session)
            if session is not None:
                session.python_gangs.discard(gang.sequence)
        program.waiting -= 1
        if program.released:
            self.drop_if_idle(program)

    def drop_if_idle(self, program: RegisteredProgram) -> None:
        """Drop a released program if no gang waits that needs it."""
        if program.released and not program.waiting:
            self._services.drop_program(program)
