"""Programs of all sessions, lowered: one plan a host, which the host keeps until nothing needs it any more."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.cluster.lifecycle import IslandLost
from atoll.cluster.locations import Placement
from atoll.dispatch.compilation import Compilation
from atoll.dispatch.outbox import Outbox
from atoll.errors import StatusError
from atoll.ir.plan import Plan
from atoll.ir.program import Program, credits_of
from atoll.promises.large_plans import LargePlans
from atoll.protocol import messages as m
from atoll.scheduling.estimates import Estimates
from atoll.scheduling.programs import RegisteredProgram, device_groups, register
from atoll.scheduling.session import Session
from atoll.scheduling.usage import Meter


class ProgramRegistry:
    """Registers and releases programs. Invariant: a plan that a gang needs is at its host when the gang is committed,
    or comes there before it.
    """

    def __init__(
        self, compilation: Compilation, outbox: Outbox, large: LargePlans, meter: Meter, estimates: Estimates
    ) -> None:
        self.plans: dict[int, dict[int, Plan]] = {}  # by number and host
        self._compilation = compilation
        self._outbox = outbox
        self._large = large
        self._meter = meter
        self._estimates = estimates
        self._next_plan = 1

    def register(self, session: Session, number: int, definition: Program) -> None:
        """A program of the session. Where it cannot be lowered, its launches fail with the reason."""
        session.definitions[number] = definition
        session.costs.pop(number, None)
        if (cost := credits_of(definition)) > 1:
            session.costs[number] = cost
        try:
            session.devices.use(definition.name, device_groups(definition))
            session.programs[number] = self.lower(session, definition, session.devices.locations, session.functions)
        except StatusError as error:
            session.programs[number] = error.status

    def release(self, session: Session, number: int) -> None:
        """The session needs the program no more."""
        session.definitions.pop(number, None)
        session.irregular.pop(number, None)
        session.costs.pop(number, None)
        program = session.programs.pop(number, None)
        if isinstance(program, RegisteredProgram):
            self.drop(program)

    def lower(
        self, session: Session, definition: Program, locations: Placement, functions: Mapping[int, str]
    ) -> RegisteredProgram:
        """Lowers a program of the session for these places and functions. Raises StatusError where it cannot be."""
        registry = self._compilation.functions
        number = self._next_plan
        account = self._meter.account(session.tenant.name, session.number, session.label, definition.name)
        program = register(
            definition,
            number,
            locations,
            functions,
            registry.scratch_of,
            registry.calls_client,
            account,
            registry.titles,
        )
        self._estimates.begin(program)
        self._next_plan += 1
        self.plans[number] = {host: each.plan for host, each in program.plans.items()}
        hosts = tuple(program.plans)
        if program.is_large:
            self._large.sent(number, hosts)
        for each, some in program.by_plan(hosts):
            self._send(some, number, each.plan)
        for name in program.functions:
            registry.acquire(name)
        return program

    def drop(self, program: RegisteredProgram) -> None:
        """Nobody launches the program any more; its plans go with the last gang of it that has yet to start."""
        program.released = True
        if program.waiting:
            return
        hosts = set(self.plans.pop(program.number)) - self._large.dropped(program.number)
        for host in sorted(hosts):
            self._outbox.to_host(host, m.DropPlan(program.number))
        self._estimates.end(program)
        for name in program.functions:
            self._compilation.drop_reference(name)

    def session_closed(self, session: Session) -> None:
        for program in session.programs.values():
            if isinstance(program, RegisteredProgram):
                self.drop(program)
        self._meter.session_closed(session.number)

    def host_joined(self, host: int) -> None:
        """The host's worker starts with nothing: it gets its plans."""
        for number, plans in self.plans.items():
            if host in plans:
                if number in self._large:
                    self._large.sent(number, (host,))
                self._send((host,), number, plans[host])

    def island_lost(self, lost: IslandLost) -> None:
        """Launches in line that need the island wait for it, and for their plans to be there again."""
        self._large.lost(lost.island, self.plans)

    def plan_registered(self, host: int, message: m.PlanRegistered) -> None:
        """The host has a large plan now; where nobody needs that any more, the host drops it."""
        if self._large.arrived(host, message.plan) and message.plan not in self.plans:
            self._outbox.to_host(host, m.DropPlan(message.plan))
            self._large.dropped(message.plan)

    def _send(self, hosts: tuple[int, ...], number: int, plan: Plan) -> None:
        if number in self._large:
            self._outbox.to_hosts_in_pieces(hosts, m.RegisterPlan(number, plan, acknowledge=True))
        else:
            self._outbox.to_hosts(hosts, m.RegisterPlan(number, plan))
