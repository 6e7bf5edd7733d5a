"""Launch control flow nodes, whose programs are known only when a device has computed which of them to run.

The Pathways paper calls such a node *irregular* (section 4.5): only launches that depend on it wait until the programs
are known. The programs of a node are ordinary programs:

- A switch has a program that reports a number, and a branch for each number.
- A loop has a program that reports whether to begin, programs for the first and the following iterations, and a last
  one that makes the results. Each iteration makes the next carried arrays and reports whether to continue.

The launches of these programs are the *parts* of the node's launch. They are also ordinary: they run in the order of
the islands, and memory is reserved for them in that order.

The results have their handles and a dependency from the start (`launch.dependency_tracker`), so launches that use them
are deferred and everything else continues. The part that makes the results gets this dependency when it is known. It
also gets the age of the node's launch, so that it precedes all later launches. A part waits only for earlier launches,
so there are no deadlocks. Each node has one part in flight at a time, so a loop competes like other launches.

`control_flow_runs` has the launches of nodes that are not over. Pure.
"""

from __future__ import annotations

from atoll.errors import Status, StatusError, invalid, not_found, unimplemented
from atoll.ir.program import credits_of
from atoll.launch.control_flow_runs import ControlFlowRuns
from atoll.launch.launch_checks import check_cost, program_problem, quota_problem
from atoll.launch.launch_queue import LaunchQueue
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Entry
from atoll.state.programs import RegisteredProgram
from atoll.state.session import ControlFlowRun, Launch, Session

# Nodes of a program that is part of control flow. They join their lines at once.
MAX_PART_NODES = 1 << 14


class ControlFlowLaunches:
    """Launches control flow nodes, and then their parts."""

    def __init__(self, shared: SharedState, parts: SharedParts, *, runs: ControlFlowRuns, queue: LaunchQueue) -> None:
        self._sessions = shared.sessions
        self._resources = shared.resources
        self._outbox = shared.outbox
        self._quarantine = shared.quarantine
        self._runs, self._dependencies = runs, parts.dependencies
        self._builder, self._queue = parts.builder, queue

    def launch(self, session: Session, message: m.Launch) -> Status | None:
        """Launch a control flow node. Return an error if that is impossible.

        Raise INVALID_ARGUMENT if the launch takes too few credits of the session's window.
        """
        node = session.control_flow[message.program]
        known = [session.definitions[each] for each in _numbers(node) if each in session.definitions]
        check_cost(message, credits_of(*known))
        try:
            parts = _parts(session, node, message)
        except StatusError as error:
            return error.status
        problem = quota_problem(session)
        for handle in message.arguments:
            problem = problem or session.directory.problem(handle)
        for program in parts:
            problem = problem or program_problem(session, program, self._quarantine, self._resources)
        if problem is not None:
            return problem
        entries = session.directory.entries
        arguments = [entries[handle] for handle in message.arguments]
        dependency = self._dependencies.undecided(session.number, arguments)
        last = parts[-1]
        for made in last.values:
            if made.result >= 0:
                spec = last.result_specs[made.result]
                entry = Entry(made.hosts, made.nbytes, producer=last.name, traceback_id=message.traceback_id, spec=spec)
                entry.dependency = dependency
                session.directory.add(message.results[made.result], entry)
        whole = ControlFlowRun(
            session.number,
            node,
            parts,
            message.arguments,
            message.results,
            dependency,
            self._builder.reserve_numbers(),
            message.traceback_id,
            message.credits,
        )
        for handle in message.arguments + message.results:
            entries[handle].uses += 1
        for program in parts:
            program.waiting += 1
        if isinstance(node, m.RegisterLoop):
            whole.carried = message.arguments[node.constants :]
            self._begin(session, whole, parts[0], message.arguments, ())
        else:
            self._begin(session, whole, parts[0], message.arguments[:1], ())
        return None

    def reported(self, host: int, sequence: int, value: int) -> None:
        """Handle the number that a host has reported for a gang, and launch the next part."""
        found = self._runs.reported(host, sequence)
        if found is None:
            return
        session, whole = found
        node, parts = whole.node, whole.parts
        if isinstance(node, m.RegisterSwitch):
            branches = parts[1:]
            branch = branches[min(max(value, 0), len(branches) - 1)]
            self._end(session, whole, branch, whole.arguments[1:])
            return
        if not value:
            self._end(session, whole, parts[3], whole.carried)
            return
        before, begins = whole.carried, whole.arguments[node.constants :]
        whole.carried = tuple([self._runs.new_handle() for _ in before])
        iteration = parts[1] if before == begins else parts[2]
        self._begin(session, whole, iteration, whole.arguments[: node.constants] + before, whole.carried)
        self._runs.drop_carried(session, whole, before)

    def _begin(
        self,
        session: Session,
        whole: ControlFlowRun,
        program: RegisteredProgram,
        arguments: tuple[int, ...],
        results: tuple[int, ...],
    ) -> None:
        """Launch a part that reports a number."""
        problem = self._problem(session, program, arguments)
        if problem is not None:
            self._runs.fail(session, whole, problem)
            return
        message = m.Launch(0, arguments, results, (), whole.traceback_id, 0)
        launch = self._launch_part(session, whole, program, message)
        for handle in results:
            session.directory.entries[handle].uses += 1
        (reporter,) = [gang for node in launch.nodes for gang in node.gangs if gang.run.spec.kind == "report"]
        (host,) = reporter.hosts
        self._runs.await_report(whole, host, reporter.sequence)

    def _end(
        self, session: Session, whole: ControlFlowRun, program: RegisteredProgram, arguments: tuple[int, ...]
    ) -> None:
        """Launch the last part, which makes the results of the node."""
        problem = self._problem(session, program, arguments)
        if problem is not None:
            self._runs.fail(session, whole, problem)
            return
        message = m.Launch(0, arguments, whole.results, (), whole.traceback_id, whole.credits)
        launch = self._launch_part(session, whole, program, message)
        self._runs.last_part_launched(session, whole)
        self._dependencies.decided(whole.dependency, launch.nodes)

    def _problem(self, session: Session, program: RegisteredProgram, arguments: tuple[int, ...]) -> Status | None:
        for handle in arguments:
            error = session.directory.entries[handle].error
            if error is not None:
                return error
        return program_problem(session, program, self._quarantine, self._resources)

    def _launch_part(
        self, session: Session, whole: ControlFlowRun, program: RegisteredProgram, message: m.Launch
    ) -> Launch:
        """Launch a part of a node, whose arguments exist or have a dependency.

        The last part takes credits: its results are those of the node, and the node's dependency defers it.
        """
        is_last = bool(message.credits)
        self._queue.restore_spilled(session, message)
        launch = self._builder.launch(session, program, message, self._outbox.seconds, results_exist=is_last)
        launch.part_of = whole
        if is_last:
            launch.dependency = whole.dependency
        self._queue.line_up(session, launch, whole.age)
        return launch


def _numbers(node: m.RegisterSwitch | m.RegisterLoop) -> tuple[int, ...]:
    """Return the numbers of the node's programs."""
    if isinstance(node, m.RegisterSwitch):
        return node.index, *node.branches
    return node.first, node.begins, node.following, node.last


def _parts(
    session: Session, node: m.RegisterSwitch | m.RegisterLoop, message: m.Launch
) -> tuple[RegisteredProgram, ...]:
    """Return the programs of a node. Raise StatusError if they do not fit together."""
    taken, given = len(message.arguments), len(message.results)
    may_consume = range(0)  # arguments that a loop's following iterations may donate
    if isinstance(node, m.RegisterSwitch):
        shapes = [(1, 0, 1), *((taken - 1, given, 0) for _ in node.branches)]
    else:
        carried = taken - node.constants
        shapes = [(taken, 0, 1), (taken, carried, 1), (taken, carried, 1), (carried, given, 0)]
        may_consume = range(max(node.constants, 0), taken)
    found = []
    for position, number in enumerate(_numbers(node)):
        program = session.programs.get(number)
        if isinstance(program, Status):
            raise program.exception()
        if program is None:
            raise not_found(f"program {number} does not exist in this session")
        if len(program.nodes) > MAX_PART_NODES:
            raise invalid(f"{program.name} is part of control flow, and has more than {MAX_PART_NODES} nodes")
        if program.is_unbounded:
            raise unimplemented(f"{program.name} calls Python, which control flow cannot do")
        if program.feeds or not program.donated.issubset(may_consume if position == 2 else ()):
            raise invalid(f"{program.name} is part of control flow, and takes client bytes or donates its arrays")
        found.append(program)
    has = [(each.arguments, each.results, each.reports) for each in found]
    alike = all(each.result_specs == found[-1].result_specs for each in found[1:])
    if len(found) < 2 or has != shapes or not alike or message.feeds:
        raise invalid(
            f"{found[-1].name} is part of control flow, and its programs do not match: (arguments, results, reports) "
            f"are {has} but must be {shapes}, with equal results"
        )
    return tuple(found)
