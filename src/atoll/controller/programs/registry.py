"""Programs of all sessions, lowered: one plan a host, which the host keeps until nothing needs it any more."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.cluster.locations import Placement
from atoll.controller.outbox import Outbox
from atoll.controller.programs.compilation import Compilation
from atoll.controller.sessions.session import Session
from atoll.errors import StatusError
from atoll.ir.plan import Plan
from atoll.ir.program import Program
from atoll.protocol import messages as m
from atoll.scheduling.programs import RegisteredProgram, device_groups, register


class ProgramRegistry:
    """Registers and releases programs. Invariant: a plan that a launch in line needs is at its host."""

    def __init__(self, compilation: Compilation, outbox: Outbox) -> None:
        self.plans: dict[int, tuple[int, Plan]] = {}  # by number: the host that has it, and the plan
        self._compilation = compilation
        self._outbox = outbox
        self._next_plan = 1

    def register(self, session: Session, number: int, definition: Program) -> None:
        """A program of the session. Where it cannot be lowered, its launches fail with the reason."""
        session.definitions[number] = definition
        try:
            session.devices.use(definition.name, device_groups(definition))
            session.programs[number] = self.lower(definition, session.devices.locations, session.functions)
        except StatusError as error:
            session.programs[number] = error.status

    def release(self, session: Session, number: int) -> None:
        """The session needs the program no more."""
        session.definitions.pop(number, None)
        program = session.programs.pop(number, None)
        if isinstance(program, RegisteredProgram):
            self.drop(program)

    def lower(self, definition: Program, locations: Placement, functions: Mapping[int, str]) -> RegisteredProgram:
        """Lowers a program for these places and functions. Raises StatusError where it cannot be."""
        registry = self._compilation.functions
        program = register(definition, locations, functions, self._keep_plan, registry.scratch_of)
        for name in program.functions:
            registry.acquire(name)
        return program

    def drop(self, program: RegisteredProgram) -> None:
        """Nobody launches the program any more; its plans go with the last gang of it that has yet to start."""
        program.released = True
        if program.waiting:
            return
        for plan in program.plans.values():
            del self.plans[plan.number]
            self._outbox.to_host(plan.host, m.DropPlan(plan.number))
        for name in program.functions:
            self._compilation.drop_reference(name)

    def session_closed(self, session: Session) -> None:
        for program in session.programs.values():
            if isinstance(program, RegisteredProgram):
                self.drop(program)

    def host_joined(self, host: int) -> None:
        """The host's worker starts with nothing: it gets its plans."""
        for number, (where, plan) in self.plans.items():
            if where == host:
                self._outbox.to_host(host, m.RegisterPlan(number, plan))

    def _keep_plan(self, host: int, plan: Plan) -> int:
        number = self._next_plan
        self._next_plan += 1
        self.plans[number] = (host, plan)
        self._outbox.to_host(host, m.RegisterPlan(number, plan))
        return number
