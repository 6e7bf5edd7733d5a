"""Programs that the controller itself launches for a session: copies, restorations, and reads of published arrays."""

from __future__ import annotations

from atoll.cluster.locations import Placement
from atoll.ir import program as ir
from atoll.launch.launcher import Launcher
from atoll.launch.outbox import Outbox
from atoll.launch.registry import ProgramRegistry
from atoll.protocol import messages as m
from atoll.state.programs import RegisteredProgram
from atoll.state.session import Session


class InternalPrograms:
    """The internal programs of sessions, which have negative numbers and call no functions."""

    def __init__(self, programs: ProgramRegistry, launcher: Launcher, outbox: Outbox) -> None:
        self._programs = programs
        self._launcher = launcher
        self._outbox = outbox
        self._next = -1  # number of the next program

    def make(self, session: Session, definition: ir.Program, places: Placement) -> int:
        """Make a program and return its number in the session. Raises StatusError if it cannot run at these places."""
        while self._next in session.programs:  # of a cluster that did not store the next number
            self._next -= 1
        number = self._next
        session.programs[number] = self._programs.lower(session, definition, places, {})
        self._next -= 1
        return number

    def drop(self, session: Session, number: int) -> None:
        """Drop a program. Its queued launches still run."""
        program = session.programs.pop(number, None)
        if isinstance(program, RegisteredProgram):
            self._programs.drop(program)

    def launch(self, session: Session, program: int, argument: int, result: int) -> None:
        self.take_credit(session)
        self._launcher.launch(session, m.Launch(program, (argument,), (result,), ()))

    def take_credit(self, session: Session) -> None:
        """Take a credit of the session for a launch, and notify its proxy."""
        self._outbox.return_credits(session.number, -1)
