"""The programs of all sessions, lowered to one plan per host. A host keeps its plan until nothing needs it any more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import cast

import msgspec

from atoll.cluster.lifecycle import IslandFailed
from atoll.cluster.locations import Placement
from atoll.errors import Code, Status, StatusError
from atoll.ir.plan import Plan
from atoll.ir.program import Program, credits_of
from atoll.ir.steps import Steps, finish
from atoll.launch.compilation import Compilation
from atoll.launch.large_plans import LargePlans
from atoll.launch.lowerings import Lowered, Lowering, Lowerings
from atoll.launch.shared_state import SharedState
from atoll.launch.uncompiled_programs import MAX_UNCOMPILED, UncompiledProgram, UncompiledPrograms
from atoll.protocol import messages as m
from atoll.state.estimates import Estimates, GangsByKey
from atoll.state.program_registration import register_in_steps
from atoll.state.programs import HostPlan, RegisteredProgram, calls_of, device_groups
from atoll.state.session import Session
from atoll.state.usage import Meter

_GROUPS_PER_STEP = 16
# Programs with at most this many nodes, and this many arguments, inputs and outputs of all nodes together, are lowered
# at once.
SMALL_NODES = 16
SMALL_VALUES = 512


class ProgramRegistry:
    """Registers and releases programs.

    Invariant: when a gang is committed, each of its hosts has the plan, or receives the plan before the gang.
    """

    def __init__(
        self,
        shared: SharedState,
        *,
        compilation: Compilation,
        large_plans: LargePlans,
        meter: Meter,
        estimates: Estimates,
    ) -> None:
        self._joint_islands = shared.settings.joint_islands
        self.lowerings = Lowerings(self._lowered)
        self._discards = shared.discards
        self._sessions = shared.sessions
        self.plans: dict[int, dict[int, HostPlan]] = {}  # by number and host
        self._compilation = compilation
        self._outbox = shared.outbox
        self._large = large_plans
        self._meter = meter
        self._estimates = estimates
        self._remains = shared.remains
        self._next_plan = 1
        self._uncompiled = UncompiledPrograms()
        compilation.subscribe(self)

    def register(self, session: Session, number: int, definition: Program, called: Iterable[int]) -> None:
        """Register a program of the session, which calls these functions.

        If it cannot be lowered, its launches fail with the reason. A large program is lowered in steps, and a program
        whose functions are being compiled is lowered after these. Its launches fail until then.
        """
        session.definitions[number] = definition
        session.costs.pop(number, None)
        if (cost := credits_of(definition)) > 1:
            session.costs[number] = cost
        called = tuple(dict.fromkeys(called))
        if self._is_large(definition):
            session.called[number] = called
        functions = _registered(called, session)
        if (missing := self._unreported(functions)) is not None:
            session.programs[number] = self._await(session, number, definition, functions, missing)
            return
        if self._is_large(definition):
            session.programs[number] = Status(Code.UNAVAILABLE, f"program {definition.name!r} is being lowered")
            self.lowerings.add(self._lowering(session, number, definition, functions, is_new=True))
            return
        try:
            session.devices.use(definition.name, device_groups(definition))
        except StatusError as error:
            session.programs[number] = error.status
            return
        self.lower_again(session, number)

    def _is_large(self, definition: Program) -> bool:
        """Return whether the program is lowered in steps."""
        nodes = definition.nodes
        if len(nodes) > SMALL_NODES:
            return True
        return len(definition.arguments) + sum([len(each.inputs) + len(each.outputs) for each in nodes]) > SMALL_VALUES

    def _unreported(self, functions: Mapping[int, str]) -> str | None:
        """Return one of these functions that no worker has reported yet, or None."""
        reports = self._compilation.functions.reports
        return next((name for name in functions.values() if name not in reports), None)

    def _await(
        self, session: Session, number: int, definition: Program, functions: Mapping[int, str], missing: str
    ) -> Status:
        """Lower the program once its functions are compiled. Return why it cannot be launched before that."""
        if self._uncompiled.is_full(session.number):
            text = f"{MAX_UNCOMPILED} programs of this session wait for functions that are being compiled: register "
            return Status(Code.RESOURCE_EXHAUSTED, f"{text}{definition.name!r} when its functions are compiled")
        program = UncompiledProgram(session, number, definition, functions)
        for name in program.names:
            self._compilation.functions.acquire(name)
        self._uncompiled.add(program, missing)
        return Status(Code.UNAVAILABLE, f"program {definition.name!r} calls a function that is being compiled")

    def function_reported(self, function: str) -> None:
        """Lower in steps the programs that waited for this function, and that wait for no other."""
        for program in self._uncompiled.take_all(function):
            if (missing := self._unreported(program.functions)) is not None:
                self._uncompiled.add(program, missing)
                continue
            session, number, definition = program.session, program.number, program.definition
            self.lowerings.add(self._lowering(session, number, definition, program.functions, is_new=True))
            self._forget(program)

    def function_failed(self, session: int, function: str, failure: Status) -> None:
        """Fail the session's programs that wait for a function that cannot be compiled."""
        for program in self._uncompiled.take_of(session, function):
            program.session.programs[program.number] = failure.within(program.definition.name)
            self._forget(program)

    def _forget(self, program: UncompiledProgram) -> None:
        for name in program.names:
            self._compilation.drop_reference(name)

    def release(self, session: Session, number: int) -> None:
        """Release a program of the session."""
        definition = session.definitions.pop(number, None)
        if definition is not None:
            self._discards.add(definition.nodes)
        session.called.pop(number, None)
        session.control_flow.pop(number, None)
        session.parts.pop(number, None)
        session.costs.pop(number, None)
        program = session.programs.pop(number, None)
        if isinstance(program, RegisteredProgram):
            self.drop(program)
        elif (uncompiled := self._uncompiled.take(session.number, number)) is not None:
            self._forget(uncompiled)

    def lower_again(self, session: Session, number: int) -> None:
        """Lower a program of the session again, for the current locations of its devices, and replace the old one."""
        definition = session.definitions[number]
        if self._is_large(definition):
            if number not in session.called:  # the session was persisted by an earlier cluster
                session.called[number] = tuple(dict.fromkeys(calls_of(definition)))
            functions = _registered(session.called[number], session)
            self.lowerings.add(self._lowering(session, number, definition, functions, is_new=False))
            return
        try:
            result: RegisteredProgram | Status = self.lower(
                session, definition, session.devices.locations, session.functions
            )
        except StatusError as error:
            result = error.status
        self._replace(session, number, result)

    def _replace(self, session: Session, number: int, result: RegisteredProgram | Status) -> None:
        if isinstance(result, Status) and session.failed_functions:
            definition = session.definitions[number]
            called = (session.functions.get(each, "") for each in calls_of(definition))
            cause = session.failed_function(called)
            result = result if cause is None else cause.within(definition.name)
        old = session.programs.get(number)
        session.programs[number] = result
        if isinstance(old, RegisteredProgram):
            self.drop(old)

    def _lowering(
        self, session: Session, number: int, definition: Program, functions: Mapping[int, str], is_new: bool
    ) -> Lowering:
        """Return a lowering for the current devices. It holds references to the functions until it ends."""
        names = tuple(dict.fromkeys(functions.values()))
        for name in names:
            self._compilation.functions.acquire(name)
        begin = partial(
            self._steps, self._new_plan(), session, definition, dict(session.devices.locations), functions, is_new
        )
        return Lowering(session, number, definition, begin, names)

    def _lowered(self, lowering: Lowering, outcome: Lowered | Status) -> None:
        """Handle the result of a lowering."""
        session = lowering.session
        result: RegisteredProgram | Status
        if isinstance(outcome, Status):
            result = outcome
        else:
            result, gangs = outcome
            self._store(result, gangs)
        if self._sessions.get(session.number) is session and lowering.number in session.definitions:
            self._replace(session, lowering.number, result)
        elif isinstance(result, RegisteredProgram):
            self.drop(result)
        for name in lowering.functions:
            self._compilation.drop_reference(name)

    def lower(
        self, session: Session, definition: Program, locations: Placement, functions: Mapping[int, str]
    ) -> RegisteredProgram:
        """Lower a small program for these locations and functions. Raise StatusError if that is impossible."""
        program, gangs = finish(self._steps(self._next_plan, session, definition, locations, functions, is_new=False))
        self._new_plan()
        self._store(program, gangs)
        return program

    def _new_plan(self) -> int:
        self._next_plan += 1
        return self._next_plan - 1

    def _steps(
        self,
        number: int,
        session: Session,
        definition: Program,
        locations: Placement,
        functions: Mapping[int, str],
        is_new: bool,
    ) -> Steps[Lowered]:
        if is_new:
            for groups in batched(device_groups(definition)):
                session.devices.use(definition.name, groups)
                yield
        account = self._meter.account(session.tenant.name, session.number, session.label, definition.name)
        program = yield from register_in_steps(
            definition,
            number,
            locations,
            functions,
            self._compilation.functions.reports,
            account,
            self._joint_islands,
        )
        return program, (yield from self._estimates.keys_of(program))

    def _store(self, program: RegisteredProgram, gangs: GangsByKey) -> None:
        """Keep the plans of a program, and send them to its hosts."""
        number = program.number
        self._estimates.begin(program, gangs)
        self.plans[number] = dict(program.plans)
        hosts = tuple(program.plans)
        if program.is_large:
            self._large.sent(number, hosts)
        for each, some in program.by_plan(hosts):
            self._send(some, number, each.plan)
        for name in program.functions:
            self._compilation.functions.acquire(name)

    def drop(self, program: RegisteredProgram) -> None:
        """Drop a program that is not launched any more, after the last of its gangs has started."""
        program.released = True
        if program.waiting:
            return
        hosts = set(self.plans.pop(program.number)) - self._large.dropped(program.number)
        for host in sorted(hosts):
            self._outbox.to_host(host, m.DropPlan(program.number))
        self._estimates.end(program)
        for name in program.functions:
            self._compilation.drop_reference(name)
        self._discards.add(*program.large_parts)

    def session_closed(self, session: Session) -> None:
        self._remains.release_in_steps(session, session.programs, self._drop_remaining)
        for uncompiled in self._uncompiled.take_of(session.number):
            self._forget(uncompiled)
        for definition in session.definitions.values():
            self._discards.add(definition.nodes)
        for part in session.parts.values():
            self._discards.add(part.nodes)
        self._meter.session_closed(session.number)

    def abandon(self, number: int) -> None:
        """Stop lowering the programs of a closed session, because of a bug."""
        for lowering in self.lowerings.abandon(number):
            for name in lowering.functions:
                self._compilation.drop_reference(name)

    def _drop_remaining(self, program: RegisteredProgram | Status) -> None:
        if isinstance(program, RegisteredProgram):
            self.drop(program)

    def host_joined(self, host: int) -> None:
        """Send a new worker the plans of its host."""
        for number, plans in self.plans.items():
            if host in plans:
                if number in self._large:
                    self._large.sent(number, (host,))
                self._send((host,), number, plans[host].plan)

    def require_plans_again(self, lost: IslandFailed) -> None:
        """Have launches in line that need the island also wait for their large plans."""
        self._large.require_again(lost.island, self.plans)

    def plan_registered(self, host: int, message: m.PlanRegistered) -> None:
        """Note that a host has a large plan. The host drops it if it is not needed any more."""
        if self._large.arrived(host, message.plan) and message.plan not in self.plans:
            self._outbox.to_host(host, m.DropPlan(message.plan))
            self._large.dropped(message.plan)

    def _send(self, hosts: tuple[int, ...], number: int, plan: Plan | msgspec.Raw) -> None:
        definition = cast(Plan, plan)  # msgspec copies an encoded plan into the message
        if number in self._large:
            self._outbox.to_hosts_in_pieces(hosts, m.RegisterPlan(number, definition, acknowledge=True))
        else:
            self._outbox.to_hosts(hosts, m.RegisterPlan(number, definition))


def _registered(called: Iterable[int], session: Session) -> dict[int, str]:
    """Return the names of the called functions, by number, without those that the session does not have."""
    return {each: session.functions[each] for each in called if each in session.functions}


def batched(groups: Iterable[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yield the groups of devices, several at a time."""
    left = iter(groups)
    while some := list(islice(left, _GROUPS_PER_STEP)):
        yield some
