"""The life of a launch: from a client's request to gangs in line, to messages to hosts, and to its end.

The events are methods here: a launch arrives, bytes arrive, a host has ended its part of a gang or reports an error, an
island or a session is lost. Gangs are sent and end here; `scheduler` puts them in line, commits and drops them; and
`delegated_runs` grants them. `gang_states` has all states. The inputs of a gang are checked when it is launched, and
again before it starts.

A gang ends when all of its hosts have ended their parts, and a launch is done when all of its gangs have ended. If a
gang fails, the gangs of its launch that have not started are dropped.

Dispatch is parallel: the gangs of a node are started before their inputs have been computed, and workers wait for data
from other hosts. `launch.sequential` has the alternative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import Code, Details, Kind, Status, failure
from atoll.launch.buffer_releases import BufferReleases
from atoll.launch.control_flow_runs import ControlFlowRuns
from atoll.launch.deferred_results import DeferredResults
from atoll.launch.delegated_runs import DelegatedRuns
from atoll.launch.dependency_tracker import DependencyTracker
from atoll.launch.gang_charges import GangCharges, Recorder
from atoll.launch.large_launches import LARGE_NODES, LargeLaunches
from atoll.launch.large_plans import LargePlans
from atoll.launch.launch_builder import LaunchBuilder
from atoll.launch.launch_checks import (
    MAX_BYTES,
    check_window,
    gang_problem,
    launch_problem,
    program_problem,
    size_problem,
)
from atoll.launch.launch_feeds import LaunchFeeds
from atoll.launch.launch_validation import validate_launches
from atoll.launch.left_out_collectives import LeftOutCollectives
from atoll.launch.policy import Policy
from atoll.launch.requeued_launches import RequeuedLaunches
from atoll.launch.reservations import Reservations
from atoll.launch.run_messages import RunMessages
from atoll.launch.scheduler import Scheduler
from atoll.launch.sequential import SequentialDispatch
from atoll.launch.shared_state import LaunchServices, SharedState
from atoll.protocol import messages as m
from atoll.state.buffer_directory import NO_ENTRY, Entry
from atoll.state.buffer_states import BufferState
from atoll.state.dispatch_units import Unit
from atoll.state.gang_states import GangState, Reason
from atoll.state.launch_states import LaunchState
from atoll.state.programs import RegisteredProgram
from atoll.state.queued_nodes import Dropped, Gang, HostCallKind, QueuedNode
from atoll.state.session import ControlFlowRun, GangRun, Launch, Session

# Gangs in flight on a host, until the hosts of its island have reported their own limit.
GANG_WINDOW = 24
# Buffers of a closed session, or on a lost island, that are released in one step of a flush.
ENTRIES_PER_STEP = 4


class Launcher:
    """All launches that have not ended.

    Args:
      trace: records the ends of gangs.
      policy: makes the scheduling policy of an island.
    """

    def __init__(
        self,
        shared: SharedState,
        services: LaunchServices,
        *,
        trace: Recorder,
        policy: Callable[[], Policy],
    ) -> None:
        resources, sessions, outbox = shared.resources, shared.sessions, shared.outbox
        settings, quarantine = shared.settings, shared.quarantine
        self.scheduler = Scheduler[GangRun](
            resources.islands.values(),
            GANG_WINDOW,
            policy,
            hosts=[each.hosts for each in resources.topology.shapes],
            keeps_kinds=shared.decisions.keeps_kinds,
            tries_after_calls=shared.decisions.tries_after_calls,
            reserve=self._reserve,
            line_up_instead=self._line_up_instead,
        )
        self.reservations = Reservations(sessions, self.scheduler, resources, services, shared.decisions.joins_blocks)
        self.in_flight: dict[int, Gang[GangRun]] = {}  # by sequence, in the order in which they were started
        self.left_out = LeftOutCollectives(self.in_flight, outbox)
        self._awaits_processes = shared.decisions.awaits_processes
        self._counts_dropped_gangs = shared.decisions.counts_dropped_gangs
        self.charges = GangCharges(trace, shared.decisions.exact_charges)
        self.remains = shared.remains
        self._resources = resources
        self._sessions = sessions
        self._outbox = outbox
        self._services = services
        self._quarantine = quarantine
        self._offenses = shared.offenses
        self._rates = shared.rates
        self._sequential = SequentialDispatch(self.scheduler) if settings.sequential else None
        self._run_messages = RunMessages(outbox, acknowledged=settings.sequential)
        self._dependencies = DependencyTracker(self.scheduler, self.enqueue, shared.decisions)
        self.large_plans = LargePlans(resources, self.scheduler)
        self.buffers = BufferReleases(shared, self.reservations, services)
        self.builder = LaunchBuilder(self.scheduler, quarantine, self.large_plans, not settings.sequential)
        self.feeds = LaunchFeeds(shared, self.scheduler)
        self.requeued = RequeuedLaunches(
            shared,
            scheduler=self.scheduler,
            sequential=self._sequential,
            builder=self.builder,
            reservations=self.reservations,
            buffers=self.buffers,
            charges=self.charges,
            in_flight=self.in_flight,
        )
        self.large_launches = LargeLaunches(self.scheduler, self.builder, self)
        self.control_flow = ControlFlowRuns(shared, self._dependencies, self.buffers, self.builder, self)
        self.deferred_results = DeferredResults(self._dependencies, self.buffers, outbox)
        self.delegated_runs = DelegatedRuns(
            shared,
            scheduler=self.scheduler,
            builder=self.builder,
            reservations=self.reservations,
            buffers=self.buffers,
            charges=self.charges,
            in_flight=self.in_flight,
            large_plans=self.large_plans,
            launches=self,
        )

    def parts(self) -> dict[str, Any]:
        """Return the parts that have state, by the names that dumps use."""
        found = {
            "reservations": self.reservations,
            "memory": self.reservations.ledger,
            "memory waits": self.reservations.waits,
            "gang charges": self.charges,
            "device clocks": self.charges.clocks,
            "dependencies": self._dependencies,
            "large plans": self.large_plans,
            "launch builder": self.builder,
            "large launches": self.large_launches,
            "control flow": self.control_flow,
            "delegated runs": self.delegated_runs,
        }
        return found if self._sequential is None else found | {"sequential dispatch": self._sequential}

    # ---- launches

    def launch_within_window(self, session: Session, message: m.Launch) -> None:
        """Launch a program as `launch` does. Raise INVALID_ARGUMENT if the proxy exceeds its session's window."""
        check_window(session, message)
        self.launch(session, message)
        if not session.in_steps:
            self._wait_and_release(session, message)

    def _wait_and_release(self, session: Session, message: m.Launch) -> None:
        """Do what a message asks for once its launch is in line, or was refused."""
        if message.wait:
            self.buffers.wait(session, message.wait, message.results)
            self.buffers.release(session, message.results, delete=False)
        if message.released:
            self.buffers.release(session, message.released, delete=False)

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
            self.start_ready()

    def _launch_control_flow(self, session: Session, message: m.Launch, problem: Status | None) -> None:
        """Launch a control flow node, or refuse the launch because of the problem, if there is one."""
        if problem is None:
            problem = self.control_flow.launch(session, message)
        if problem is not None:
            self._refuse(session, None, message, problem)
            return
        session.count_launch()
        self.start_ready()

    def _refuse(
        self, session: Session, program: RegisteredProgram | Status | None, message: m.Launch, problem: Status
    ) -> None:
        """Make errors of the results of a launch that cannot run, and drop the bytes that its client sends."""
        session.note_error(problem)
        for handle in message.results:
            session.directory.add(handle, Entry((), 0, BufferState.FAILED, problem))
        if isinstance(program, RegisteredProgram) and message.contents is None:
            self.feeds.refuse(session, program.gangs, message.feeds)
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
        self._restore_spilled(session, message)
        is_plain = self._sequential is None and not self._dependencies.has_some(session.number)
        delegated = self.delegated_runs.program_of(session, program) if is_plain else None
        if delegated is not None:
            state = LaunchState.DELEGATED
        else:
            state = LaunchState.BEGINNING if len(program.nodes) > LARGE_NODES else LaunchState.ACTIVE
        launch = self.builder.launch(session, program, message, self._outbox.seconds, state)
        launch.then = then
        if state is LaunchState.BEGINNING:
            self.large_launches.begin(session, launch, message)
            return False
        if delegated is not None:
            self.delegated_runs.line_up(session, launch, delegated)
        else:
            self._line_up(session, launch)
        self._limit_rate(session, launch)
        return True

    def launch_to_restore(self, session: Session, message: m.Launch, then: Callable[[Launch], None]) -> Launch:
        """Launch a program that makes spilled arrays again, under their existing handles. Call `then` at its end."""
        program = session.programs[message.program]
        assert isinstance(program, RegisteredProgram)
        session.credits += message.credits
        session.count_launch()
        self._restore_spilled(session, message)
        launch = self.builder.launch(session, program, message, self._outbox.seconds, results_exist=True)
        launch.then = then
        for value in program.result_values:
            launch.entries[value].hosts = program.values[value - program.arguments].hosts
        self._line_up(session, launch)
        return launch

    def launch_part(self, whole: ControlFlowRun, program: RegisteredProgram, message: m.Launch) -> Launch:
        """Launch a part of a control flow node, whose arguments exist or have a dependency.

        The last part takes credits: its results are those of the node, and the node's dependency defers it.
        """
        session, is_last = self._sessions[whole.session], bool(message.credits)
        self._restore_spilled(session, message)
        launch = self.builder.launch(session, program, message, self._outbox.seconds, results_exist=is_last)
        launch.part_of = whole
        if is_last:
            launch.dependency = whole.dependency
        self._line_up(session, launch, whole.age)
        return launch

    def _restore_spilled(self, session: Session, message: m.Launch) -> None:
        if session.has_spilled:
            entries = session.directory.entries
            spilled = [each for each in message.arguments if entries[each].spilled is not None]
            self._services.restore_spilled(session, spilled)

    def _limit_rate(self, session: Session, launch: Launch) -> None:
        """Delay a launch if its tenant has launched too many within a second."""
        if not self._rates.charge_launch(session.tenant, launch, self._outbox.seconds):
            self.scheduler.lacks(launch.nodes[0], Reason.RATE)

    def _line_up(self, session: Session, launch: Launch, age: int = -1) -> None:
        """Make the nodes of the launch, and enqueue them, or defer them until they may join their lines."""
        units = self.builder.make_nodes(session, launch, age)
        if not launch.pending:
            self._end_launch(launch)
            return
        if launch.dependency is None:
            self._order_by_dependencies(launch, units)
        if launch.dependency is None:
            for node in launch.nodes:
                self.enqueue(node)

    def _order_by_dependencies(self, launch: Launch, units: Sequence[Unit]) -> None:
        """Give a launch a dependency if it must not join its lines before others have made progress."""
        program, entries = launch.program, launch.entries
        if not program.is_unbounded and not self._dependencies.has_some(launch.session):
            return
        donated = [entries[i] for i in program.donated]
        launch.dependency = self._dependencies.order(launch.nodes, units, entries[: program.arguments], donated)
        if launch.dependency is not None:
            for entry in entries[program.arguments :]:
                entry.dependency = launch.dependency

    def enqueue(self, node: QueuedNode[GangRun]) -> None:
        """Have a node join its lines."""
        if self._sequential is not None:
            self._sequential.join(node)
        self.scheduler.enqueue(node)

    # ---- large launches

    def nodes_made(self, session: Session, launch: Launch, units: Sequence[Unit]) -> bool:
        """Note that all nodes of a large launch are made. Return whether they join their lines now.

        Meanwhile the launch may have become impossible, and then it fails.
        """
        program = launch.program
        problems = (session.directory.problem(handle) for handle in launch.arguments)
        problem = next((each for each in problems if each is not None), None)
        problem = problem or program_problem(session, program, self._quarantine, self._resources)
        if problem is not None:
            self.fail(launch, problem)
            return False
        launch.enter(LaunchState.ACTIVE)
        for i in program.donated:
            launch.entries[i].consume()
        self._order_by_dependencies(launch, units)
        self._limit_rate(session, launch)
        return launch.dependency is None

    def lined_up(self, session: Session, launch: Launch, message: m.Launch) -> None:
        """Note that the large launch of a message is in line, or has failed."""
        self.buffers.unuse(session, launch.arguments)
        self._wait_and_release(session, message)

    def clear(self, launch: Launch, values: Sequence[int], nodes: Sequence[QueuedNode[GangRun]]) -> None:
        """Free the memory of inner values, and the records of nodes, after the end of a large launch."""
        entries, release = launch.entries, self.reservations.release
        for value in values:
            if entries[value].blocks:  # few have memory, and a pipeline's step has thousands of values
                release(entries[value])
            entries[value] = NO_ENTRY
        for node in nodes:
            node.end()

    # ---- gangs in line

    def release_delayed(self) -> None:
        """Make the launches ready that were delayed by the limits of their tenants, and that are due."""
        if self._rates.delayed:
            for node in self._rates.due(self._outbox.seconds):
                self.scheduler.arrived(node, Reason.RATE)

    def _reserve(self, node: QueuedNode[GangRun]) -> Reason | None:
        """Reserve memory. The reservations need the scheduler, which is made first."""
        return self.reservations.reserve(node)

    def _line_up_instead(self, node: QueuedNode[GangRun]) -> bool:
        """Put a launch in line node by node if it may not be delegated. Return whether this was done."""
        if self.delegated_runs.may_be_committed(node):
            return False
        self.delegated_runs.enqueue_rest_of(node)
        return True

    def start_ready(self) -> None:
        """Start the gangs that islands can take now."""
        scheduler = self.scheduler
        touched = scheduler.touched
        if scheduler.contended:
            self.delegated_runs.revoke_contended()
        if not touched:
            return
        while touched:
            for island in sorted(touched):  # any order is correct, but the event log must replay
                touched.discard(island)
                while (gang := scheduler.start_next(island)) is not None:
                    self._start(gang)
        self._run_messages.forget_newest()

    def _start(self, gang: Gang[GangRun]) -> None:
        run, launch = gang.run, gang.run.launch
        session = self._sessions.get(launch.session)
        problem = gang_problem(session, gang)
        if problem is not None or session is None:
            self.scheduler.finished(gang)
            self.fail(launch, problem or Status(Code.CANCELLED))
            return
        if self.reservations.ledger.is_tight:
            self.publish_frees()
        node, spec, now = gang.node, run.spec, self._outbox.seconds
        run.waited = node.waited_until(now)
        gang.started_at = now
        self.in_flight[gang.sequence] = gang
        if node.is_delegated:
            self.delegated_runs.start(gang)
            return
        gang.enter(GangState.RUNNING)
        self.charges.started(gang, now - launch.seconds)
        self._run_messages.send(gang)
        if self._sequential is not None:
            self._sequential.started(gang, len(spec.hosts))
        self.gang_left_line(gang)
        self.buffers.drop_uses(session, gang)

    def publish_frees(self) -> None:
        """Send the pending frees to the hosts, before later messages."""
        self._outbox.flush_frees()
        self.reservations.ledger.frees_published()

    # ---- gangs

    def parts_ended(self, hosts: tuple[int, ...], sequence: int, times: tuple[int, ...]) -> None:
        """Handle that hosts have ended their parts of a gang.

        `times` has for each host its dispatch there and its end, in nanoseconds of the host's clock.
        """
        gang = self.in_flight.get(sequence)
        if gang is None:
            return
        run = gang.run
        left = run.hosts_left
        if not left.issuperset(hosts):  # some have ended or failed before
            for position, host in enumerate(hosts):
                if host in left:
                    self.parts_ended((host,), sequence, times[2 * position : 2 * position + 2])
            return
        self.charges.parts_ended(gang, hosts, times)
        left.difference_update(hosts)
        if not left:
            self._all_parts_ended(gang)

    def parts_lost(self, gang: Gang[GangRun], hosts: set[int], failure: Status) -> None:
        """Handle that hosts of a gang are lost, with their island. Its launch has failed.

        The hosts of a joint gang on its other islands end their parts.
        """
        run = gang.run
        run.failure = run.failure or failure
        run.hosts_left -= hosts
        if not gang.islands or not run.hosts_left:
            self.end_gang(gang)

    def rows_moved(self, host: int, message: m.RowsMoved) -> None:
        """Count the bytes of rows that a host has moved for a gang."""
        gang = self.in_flight.get(message.sequence)
        if gang is not None and host in gang.run.hosts_left:
            gang.run.note_rows(host, message.sent, message.received)

    def part_failed(self, host: int, sequence: int, failure: Status) -> None:
        """Handle that a host's part of a gang has failed."""
        gang = self.in_flight.get(sequence)
        if gang is None or host not in gang.run.hosts_left:
            self._outbox.to_host(host, m.CollectiveEnded(sequence))  # the gang may have been a collective
            return
        if gang.run.spec.collective:
            self.left_out.add(gang, host)
            cause = self._services.cause_of(gang.node)
            failure = failure if cause is None else cause.within(gang.run.launch.program.name)
        if not gang.node.is_delegated:  # other gangs of a delegated run are in flight on the host
            gang.run.hosts_left.discard(host)
        if self._may_be_of_another_host(gang, failure):
            # The loss of that host is reported soon, and names the cause.
            gang.run.failure = gang.run.failure or failure
        else:
            self.fail(gang.run.launch, failure)
        if not gang.run.hosts_left:
            self._all_parts_ended(gang)

    def device_failed(self, host: int, sequence: int, failure: Status) -> None:
        """Handle that a collective gang failed on a device of a host, and may not end on others.

        This failure is the cause of those that the other devices will report.
        """
        gang = self.in_flight.get(sequence)
        if gang is None or not gang.run.spec.collective or host not in gang.run.hosts_left:
            return
        if gang.run.spec.is_apart and host not in gang.run.left_out:
            self.left_out.add(gang, host)
        for each in (gang,) if gang.run.spec.is_apart else gang.node.gangs:
            each.run.failure = each.run.failure or failure

    def ended_with_others(self, run: GangRun, failure: Status) -> bool:
        """Return whether a gang failed by the end of a Python process, which ends with those on the other hosts."""
        is_ended_process = failure.details.kind is Kind.PYTHON and failure.details.retriable
        return is_ended_process and len(run.spec.hosts) > 1 and self._awaits_processes

    def _all_parts_ended(self, gang: Gang[GangRun]) -> None:
        run = gang.run
        if run.spec.collective:
            self.left_out.ended(gang.node)
        if run.failure is not None and run.launch.error is None:
            return  # `Failures` decides soon whether it has failed by itself, and ends it
        if run.launch.error is None and gang.exclusive:
            for name in run.spec.functions:
                self._quarantine.ended_well(name)
        self.end_gang(gang)

    def _may_be_of_another_host(self, gang: Gang[GangRun], failure: Status) -> bool:
        """Return whether the loss of another host may have failed a gang on this one."""
        communicates = gang.run.spec.collective or failure.details.kind is Kind.LINK
        if communicates or self.ended_with_others(gang.run, failure):
            return True
        launch = gang.run.launch
        # Its inputs may be made together with other hosts, and fail before the failure of the host is known.
        reads_unready = any(not entry.ready for entry in launch.entries[: len(launch.arguments)])
        may_read_of_collective = reads_unready and any(
            other.run.spec.collective and other.node.session == launch.session for other in self.in_flight.values()
        )
        if may_read_of_collective:
            return True
        has_other_hosts = len(self._resources.hosts_of(gang.island)) > 1
        return has_other_hosts and (reads_unready or len(launch.nodes) > 1)

    def end_gang(self, gang: Gang[GangRun]) -> None:
        """End a gang that was started, with or without success. Its session is charged for it."""
        run, node = gang.run, gang.node
        if node.is_delegated:
            self.delegated_runs.end_failed_gang(gang)
            return
        launch, dependency = run.launch, node.dependency
        gang.enter(GangState.DONE if launch.error is None else GangState.FAILED)
        self.in_flight.pop(gang.sequence, None)
        if run.spec.collective:
            self.left_out.ended(node)
        if self._sequential is not None:
            self._sequential.ended(gang)
        self.charges.ended(gang)
        self.scheduler.finished(gang, run.device_ns)
        self.reservations.ended(gang)
        if dependency is not None and all(other.is_over for other in node.gangs):
            self._dependencies.resolve(dependency)
        self.count_ended_gang(launch)

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

    def enqueued(self, sequence: int) -> None:
        """Handle that a host has enqueued its part of a gang."""
        gang = self.in_flight.get(sequence)
        if self._sequential is not None and gang is not None:
            self._sequential.enqueued(gang)

    def island_restarted(self, island: int) -> None:
        """Resume an island whose hosts have restarted, with nothing on them and with new clocks."""
        for host in self._resources.hosts_of(island):
            self.charges.host_restarted(host)
        self.scheduler.offer_again(island)

    def validate(self) -> None:
        """Raise AssertionError if states contradict what is counted. For tests, since it looks at all launches."""
        validate_launches(self.scheduler, self.in_flight, self.charges, self.left_out, self._sessions)
        self.delegated_runs.validate()

    # ---- ends of launches

    def count_ended_gang(self, launch: Launch) -> None:
        """Count a gang of the launch that has ended, or that was dropped."""
        launch.pending -= 1
        if not launch.pending:
            self._end_launch(launch)
            if len(launch.program.nodes) > LARGE_NODES:
                self.large_launches.end(launch)
                return
            for node in launch.nodes:
                node.end()

    def _end_launch(self, launch: Launch) -> None:
        """Settle the results of a launch whose gangs have all ended: they are ready, or errors."""
        session, program, error = self._sessions.get(launch.session), launch.program, launch.error
        was_delegated = launch.state is LaunchState.DELEGATED
        launch.enter(LaunchState.ENDED)
        if error is not None or session is None:
            for entry in launch.entries[program.arguments :]:
                self.reservations.release(entry)
        elif program.inner_values and not was_delegated and len(program.nodes) <= LARGE_NODES:
            for value in program.inner_values:
                self.reservations.release(launch.entries[value])
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
        self.buffers.settle_all(session, launch.results, error)
        if launch.credits:
            self.return_credits_of_launch(session, launch.credits)
        if launch.part_of is not None:
            self.control_flow.part_ended(launch)
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
        self.buffers.free_errors(session, made, self._lost_hosts(launch))

    def _free_lost_results(self, session: Session, launch: Launch) -> None:
        """Free results of a launch that have lost a part with an island, while the launch made others."""
        failed = BufferState.FAILED
        lost = [(handle, entry) for handle, entry in launch.named_results() if entry.state is failed and entry.blocks]
        for _, entry in lost:
            self.reservations.release(entry)
        if lost:
            self.buffers.free_errors(session, lost, self._lost_hosts(launch))

    def _lost_hosts(self, launch: Launch) -> list[int]:
        return [host for host in launch.hosts_started if self._resources.has_failed(host)]

    def return_credits_of_launch(self, session: Session, credits: int) -> None:
        """Return the credits of a client's launch that has ended."""
        session.launch_ended(credits)
        self._outbox.return_credits(session.number, credits, may_wait=session.credits > 0)

    def fail(self, launch: Launch, status: Status) -> None:
        """Fail a launch: drop its gangs that have not started, and refuse its results to later launches."""
        if launch.error is not None:
            return
        launch.error = status
        launch.enter(LaunchState.FAILING)
        session = self._sessions.get(launch.session)
        if session is not None:
            session.note_error(status)
            self.buffers.fail(session, launch.results, status)
        unstarted = self._drop_unstarted(launch)
        self._stop_hosts(launch, unstarted, status)
        for gang in unstarted:
            self.gang_left_line(gang)
            if session is not None:
                if launch.contents is None:
                    self.feeds.refuse(session, [gang.run.spec], launch.feeds, taken=True)
                self.buffers.drop_uses(session, gang)
            if gang.node.is_delegated:
                self.delegated_runs.count_ended(gang)
        self.delegated_runs.launch_failed(launch)
        if self._sequential is not None:
            for node in launch.nodes:
                self._sequential.finish(node)
        if unstarted:
            for node in launch.nodes:
                self._end_if_partly_begun(node, status)
        for _ in unstarted:
            self.count_ended_gang(launch)

    def _end_if_partly_begun(self, node: QueuedNode[GangRun], status: Status) -> None:
        """Have islands end a node that they may have begun together with others, if those dropped it.

        They would wait for the others, or meet a later node that these begin. Other nodes that are in flight on these
        islands end as well: any of them may have begun on only some hosts. If an island of the node is lost, its world
        is closed anyway.
        """
        gangs = node.gangs
        if len(gangs) < 2 or not gangs[0].run.spec.collective or gangs[0].run.spec.is_apart:
            return
        states = {gang.state for gang in gangs}
        islands = [self._resources.islands[gang.island] for gang in gangs]
        is_partly_begun = GangState.RUNNING in states and GangState.DROPPED in states
        if not is_partly_begun or not self._counts_dropped_gangs or not all(island.works for island in islands):
            return
        launch = gangs[0].run.launch
        text = f"{launch.program.name} ended before all of its islands had begun it ({status.message})"
        text += ", and so did the other runs of its tenant on these islands"
        ended = failure(Code.UNAVAILABLE, text, Details(Kind.LINK, retriable=True))
        for each in self._services.end_world_of(node, ended):
            other = each.gangs[0].run.launch
            if other is not launch and any(gang.state <= GangState.COMMITTED for gang in each.gangs):
                self.fail(other, ended.within(other.program.name))

    def _drop_unstarted(self, launch: Launch) -> list[Gang[GangRun]]:
        """Drop the gangs of a failing launch that have not started. Return them."""
        unstarted: list[Gang[GangRun]] = []
        for node in launch.nodes:
            dropped = self.scheduler.drop(node)
            self.reservations.dropped(dropped)
            unstarted += dropped.gangs
        return unstarted

    def _stop_hosts(self, launch: Launch, unstarted: Sequence[Gang[GangRun]], status: Status) -> None:
        """Have hosts stop waiting for what a failing launch does not send or start any more."""
        for node in launch.nodes:
            self.left_out.ended(node)
            for gang in node.gangs:
                self.feeds.fail_incoming(gang, status)
        for host in {host for gang in unstarted for host in gang.run.spec.hosts}:
            if host in launch.hosts_started and not self._resources.has_failed(host):
                self._outbox.to_host(host, m.DropRun(launch.session, launch.hosts_started[host]))

    def session_closed(self, session: Session) -> None:
        """Drop the gangs of the session that have not started, and release its memory."""
        self.control_flow.session_closed(session.number)
        session.tenant.ended(session.in_flight)
        self._dependencies.forget(session.number)
        if self._sequential is not None:
            self._sequential.forget(session.number)
        nodes = self.scheduler.drop_session(session.number)
        for dropped in nodes:
            self.reservations.dropped(dropped)
        for dropped in nodes:
            self._end_if_partly_begun(dropped.node, _ended(session.number))
        later = [dropped for dropped in nodes if not dropped.node.is_delegated]
        for dropped in nodes:
            if dropped.node.is_delegated:
                self._end_dropped(dropped)
        self.remains.release_in_steps(session, later, self._end_dropped)
        for gang in self.delegated_runs.session_closed(session.number):
            self.feeds.fail_incoming(gang, _ended(session.number))  # its hosts stop, each at a different place
        # After the nodes, since dropped nodes return the memory that they have inherited from these entries.
        self.remains.release_in_steps(session, session.directory.entries, self.reservations.release, ENTRIES_PER_STEP)

    def _end_dropped(self, dropped: Dropped[GangRun]) -> None:
        """End the gangs of a closed session's node that were dropped."""
        node = dropped.node
        self.left_out.ended(node)
        for gang in node.gangs:
            if gang.state is not GangState.DROPPED:
                self.feeds.fail_incoming(gang, _ended(node.session))  # from the parts that will not start
        for gang in dropped.gangs:
            self.gang_left_line(gang)
            if node.is_delegated:
                self.delegated_runs.count_ended(gang)
            self.count_ended_gang(gang.run.launch)


def _ended(session: int) -> Status:
    return Status(Code.CANCELLED, f"session {session} has ended")
