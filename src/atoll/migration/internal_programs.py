"""Programs that the controller launches in a session's name, under numbers that its proxy does not give."""

from __future__ import annotations

from atoll.cluster.locations import Placement
from atoll.ir import program as ir
from atoll.migration.controller import Launches, Out, Programs
from atoll.protocol import messages as m
from atoll.scheduling.programs import RegisteredProgram
from atoll.scheduling.session import Session


class InternalPrograms:
    """Makes, launches and drops them. They call no functions."""

    def __init__(self, programs: Programs, launches: Launches, out: Out) -> None:
        self._programs = programs
        self._launches = launches
        self._out = out

    def make(self, session: Session, definition: ir.Program, places: Placement) -> int:
        """Its number in the session. Raises StatusError where it cannot be lowered for these places."""
        number = min((0, *session.programs)) - 1
        session.programs[number] = self._programs.lower(session, definition, places, {})
        return number

    def drop(self, session: Session, number: int) -> None:
        """It is launched no more; launches of it that are in line still run."""
        program = session.programs.pop(number, None)
        if isinstance(program, RegisteredProgram):
            self._programs.drop(program)

    def launch(self, session: Session, program: int, argument: int, result: int) -> None:
        self.take_credit(session)
        self._launches.launch(session, m.Launch(program, (argument,), (result,), ()))

    def take_credit(self, session: Session) -> None:
        """A launch takes a credit of the session's, of which its proxy must know."""
        self._out.return_credits(session.number, -1)
