"""From a client's launch to gangs that hosts start: nodes in line, memory, and messages to hosts.

A gang's inputs are checked when it is launched, and again before it starts. What follows is in `launch_completion`, and
when a buffer's memory goes in `buffers`.

Dispatch is parallel: a node's gangs are started before anything that they need has run; what comes from another host is
awaited by the worker. `dependencies.sequential` has the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from atoll.cluster.resources import ResourceManager
from atoll.dependencies.control_flow_runs import ControlFlowRuns
from atoll.dependencies.delegated_charges import DelegatedCharges
from atoll.dependencies.delegated_runs import DelegatedRuns
from atoll.dependencies.dependency_tracker import DependencyTracker
from atoll.dependencies.large_plans import LargePlans
from atoll.dependencies.sequential import SequentialDispatch
from atoll.dispatch.buffer_releases import BufferReleases
from atoll.dispatch.large_launches import LARGE_NODES, LargeLaunches
from atoll.dispatch.launch_completion import LaunchCompletion
from atoll.dispatch.outbox import Outbox
from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.scheduling.buffer_directory import NO_ENTRY, Entry
from atoll.scheduling.dispatch_units import Unit
from atoll.scheduling.launch_checks import check_window, gang_problem, launch_problem, program_problem
from atoll.scheduling.offenses import TenantOffenses
from atoll.scheduling.policies.fair import FairShares
from atoll.scheduling.policy import Policy
from atoll.scheduling.programs import RegisteredProgram
from atoll.scheduling.quarantine import Quarantine
from atoll.scheduling.queued_nodes import Gang, HostCallKind, QueuedNode
from atoll.scheduling.rates import TenantRates
from atoll.scheduling.reasons import Reason
from atoll.scheduling.remains import Remains
from atoll.scheduling.reservations import Reservations
from atoll.scheduling.scheduler import Scheduler
from atoll.scheduling.session import ControlFlowRun, GangRun, Launch, Session
from atoll.scheduling.tallies import Tallies

# Until an island's hosts have said how many runs may be in flight on them.
GANG_WINDOW = 24


class Launcher:
    """Puts gangs in line, and starts them.

    `on_program_idle(program)` is called when the last gang of a released program has started. With `sequential`, gangs
    are dispatched one after another. `policy()` makes the scheduling policy of an island. `delegate_after_seconds` is
    `exclusive_after` of `DelegatedRuns`.
    """

    def __init__(
        self,
        resources: ResourceManager,
        sessions: dict[int, Session],
        outbox: Outbox,
        on_program_idle: Callable[[RegisteredProgram], None],
        quarantine: Quarantine,
        offenses: TenantOffenses,
        rates: TenantRates,
        remains: Remains,
        sequential: bool = False,
        policy: Callable[[], Policy] = FairShares,
        delegate_after_seconds: float | None = None,
    ) -> None:
        topology = resources.topology
        self.scheduler = Scheduler[GangRun](
            topology.islands, GANG_WINDOW, policy, hosts=[each.hosts for each in topology.shapes]
        )
        self._resources = resources
        self._sessions = sessions
        self._outbox = outbox
        self._quarantine = quarantine
        self._offenses = offenses
        self._rates = rates
        self.remains = remains
        self.memory = Reservations(sessions, self.scheduler, resources)
        self.scheduler.use_memory(self.memory.reserve)
        self._next_sequence = 1
        self._next_internal_feed = m.INTERNAL_FEEDS
        self._sequential = SequentialDispatch(self.scheduler) if sequential else None
        self.large_plans = LargePlans(resources, self.scheduler)
        self._dependencies = DependencyTracker(self.scheduler, self.enqueue)
        self._buffers = BufferReleases(self.memory, outbox)
        self._completion = LaunchCompletion(
            resources,
            sessions,
            outbox,
            self.scheduler,
            self._dependencies,
            self.memory,
            self._buffers,
            quarantine,
            on_program_idle,
            self._sequential,
            remains,
        )
        self.large_launches = LargeLaunches(sessions, self.scheduler, self)
        self._completion.on_large_end = self.large_launches.end
        self.trace = self._completion.trace
        self.in_flight = self._completion.in_flight
        self.tallies = Tallies()
        self.gang_left, self.gang_ended = self._completion.gang_left, self._completion.gang_ended
        self.drop_uses = self._buffers.drop_uses
        charges = DelegatedCharges(self.tallies, self._completion.clocks, self.trace.record_run)
        self.delegated_runs = DelegatedRuns(
            self, resources, sessions, outbox.to_host, quarantine, charges, delegate_after_seconds
        )
        self._completion.delegated_runs = self.delegated_runs
        # For the other parts of the controller, at no cost for what is on the path of each gang.
        self.run_failed = self._completion.run_failed
        self.runs_ended = self._completion.runs_ended
        self.rows_moved = self._completion.rows_moved
        self.finish = self._completion.finish
        self.fail = self._completion.fail
        self.release = self._buffers.release
        self.settle = self._buffers.settle
        self.unuse = self._buffers.unuse
        self.end_credits = self._completion.end_credits
        self.drop_if_idle = self._completion.drop_if_idle
        self.control_flow = ControlFlowRuns(
            sessions, resources, quarantine, self._dependencies, self, self.reserve_numbers
        )
        self._completion.on_part_ended = self.control_flow.part_ended
        self.restore: Callable[[Session, list[int]], None]  # spilled arrays; to be set
        self.buffers = self._buffers

    # ---- events

    def launch_within_window(self, session: Session, message: m.Launch) -> None:
        """As `launch`, for a client whose proxy is to keep to its window. Raises INVALID_ARGUMENT where it does not."""
        check_window(session, message)
        self.launch(session, message)
        if message.released and not session.in_steps:
            self._buffers.release(session, message.released, delete=False)

    def launch(self, session: Session, message: m.Launch) -> None:
        """Launch a program whose results have handles that are new. What cannot run gives results that stand for the
        reason.
        """
        session.credits += message.credits
        program = session.programs.get(message.program)
        has_control_flow = program is None and message.program in session.control_flow
        problem = self._offenses.launch_problem(session.tenant, self._outbox.seconds)
        if problem is not None:
            pass
        elif has_control_flow:
            problem = self.control_flow.launch(session, message)
        else:
            problem = launch_problem(session, program, message, self._quarantine, self._resources)
        if problem is not None:
            session.has_errors = True
            for handle in message.results:
                session.directory.add(handle, Entry((), 0, ready=True, error=problem))
            if isinstance(program, RegisteredProgram):
                self._completion.refuse_feeds(session, program.gangs, message.feeds)
            session.credits -= message.credits
            self._outbox.return_credits(session.number, message.credits)
            return
        session.launched()
        if isinstance(program, RegisteredProgram):
            is_plain = self._sequential is None and not self._dependencies.has_some(session.number)
            delegated = self.delegated_runs.program_of(session, program) if is_plain else None
            if delegated is None and len(program.nodes) > LARGE_NODES:
                launch = self._new_launch(session, program, message, is_large=True)
                for entry in launch.entries[: program.arguments]:
                    entry.uses += 1  # until its nodes are made
                self.large_launches.begin(session, launch, message)
                return
            launch = self._new_launch(session, program, message, is_delegated=delegated is not None)
            if delegated is None:
                self._line_up(launch, self._make_nodes(session, launch))
            else:
                self.delegated_runs.line_up(session, launch, delegated)
            if not self._rates.launched(session.tenant, launch, self._outbox.seconds):
                self.scheduler.lacks(launch.nodes[0], Reason.RATE)
        self.start_ready()

    def launch_again(self, session: Session, message: m.Launch, then: Callable[[Launch], None]) -> Launch:
        """Launch a program that makes buffers that the session has, and that are spilled; call `then` at its end."""
        program = session.programs[message.program]
        assert isinstance(program, RegisteredProgram)
        session.credits += message.credits
        session.launched()
        launch = self._new_launch(session, program, message, have_results=True)
        launch.then = then
        for made, entry in zip(program.values, launch.entries[program.arguments :], strict=True):
            entry.hosts, entry.ready = made.hosts, False
        self._line_up(launch, self._make_nodes(session, launch))
        return launch

    def launch_part(self, whole: ControlFlowRun, program: RegisteredProgram, message: m.Launch) -> Launch:
        """Launch a part of a control flow node; the last part takes credits."""
        session = self._sessions[whole.session]
        launch = self._new_launch(session, program, message, have_results=bool(message.credits))
        launch.part_of = whole
        units = self._make_nodes(session, launch, whole.age)
        if message.credits:
            launch.dependency = whole.dependency
        if not (message.credits and launch.pending):
            self._line_up(launch, units)
        return launch

    def _make_nodes(self, session: Session, launch: Launch, age: int = -1) -> Sequence[Unit]:
        """The launch's dispatch units, each with its node."""
        may_join = len(launch.program.nodes) > 1 and self.may_join(session, launch.program)
        units = launch.program.units.next_launch(may_join=may_join)
        for unit in units:
            self.make_node(session, launch, unit, age)
        for i in launch.program.donated:
            launch.entries[i].consumed = True
        return units

    def may_join(self, session: Session, program: RegisteredProgram) -> bool:
        """Return whether short nodes of a launch are joined."""
        return (
            len(program.nodes) > 1
            and self._sequential is None
            and not self._quarantine.suspects
            and not self._is_contended(session, program)
        )

    def begin_lines(self, session: Session, launch: Launch, units: Sequence[Unit]) -> bool:
        """Note that all nodes of a large launch are made. Return whether they join their lines now.

        Meanwhile the launch may have become impossible, and then it fails.
        """
        program = launch.program
        problems = (session.directory.problem(handle) for handle in launch.arguments)
        problem = next((each for each in problems if each is not None), None)
        problem = problem or program_problem(session, program, self._quarantine, self._resources)
        if problem is not None:
            self._completion.fail(launch, problem)
            return False
        for i in program.donated:
            launch.entries[i].consumed = True
        if program.is_unbounded or self._dependencies.has_some(launch.session):
            self._order_by_dependencies(launch, units)
        if not self._rates.launched(session.tenant, launch, self._outbox.seconds):
            self.scheduler.lacks(launch.nodes[0], Reason.RATE)
        return launch.dependency is None

    def is_in_line(self, session: Session, launch: Launch, released: tuple[int, ...]) -> None:
        """Note that a large launch is in line, or has failed; the client needs the `released` handles no more."""
        self._buffers.unuse(session, launch.arguments)
        self._buffers.release(session, released, delete=False)

    def clear(self, launch: Launch, values: Sequence[int], nodes: Sequence[QueuedNode[GangRun]]) -> None:
        """Free the memory of inner values, and what nodes refer to, after the end of a large launch."""
        for value in values:
            self.memory.release(launch.entries[value])
            launch.entries[value] = NO_ENTRY
        for node in nodes:
            node.end()

    def _line_up(self, launch: Launch, units: Sequence[Unit]) -> None:
        """Enqueue the nodes of the launch, or defer them until they may join their lines."""
        if not launch.pending:
            self._completion.launch_done(launch)
            return
        if launch.program.is_unbounded or self._dependencies.has_some(launch.session):
            self._order_by_dependencies(launch, units)
        if launch.dependency is None:
            for node in launch.nodes:
                self.enqueue(node)

    def _order_by_dependencies(self, launch: Launch, units: Sequence[Unit]) -> None:
        program, entries = launch.program, launch.entries
        donated = [entries[i] for i in program.donated]
        launch.dependency = self._dependencies.order(launch.nodes, units, entries[: program.arguments], donated)
        if launch.dependency is not None:
            for entry in entries[program.arguments :]:
                entry.dependency = launch.dependency

    def enqueue(self, node: QueuedNode[GangRun]) -> None:
        if self._sequential is not None:
            self._sequential.join(node)
        self.scheduler.enqueue(node)

    def _new_launch(
        self,
        session: Session,
        program: RegisteredProgram,
        message: m.Launch,
        have_results: bool = False,
        is_delegated: bool = False,
        is_large: bool = False,
    ) -> Launch:
        """With `have_results`, its results have their entries already; with `is_delegated`, others have none. With
        `is_large`, `make_entries` makes all of them later.
        """
        directory = session.directory
        if session.has_spilled:
            self.restore(session, [each for each in message.arguments if directory.entries[each].spilled is not None])
        entries = [directory.entries[handle] for handle in message.arguments]
        first = len(entries)
        entries += [NO_ENTRY] * len(program.values)
        for value in program.result_values if is_delegated else range(first, first if is_large else len(entries)):
            made = program.values[value - first]
            if have_results and made.result >= 0:
                entries[value] = directory.entries[message.results[made.result]]
                continue
            entry = entries[value] = Entry(
                made.hosts, made.nbytes, producer=program.name, traceback_id=message.traceback_id
            )
            if made.result >= 0:
                entry.spec = program.result_specs[made.result]
                directory.add(message.results[made.result], entry)
        return Launch(
            session.number,
            program,
            message.arguments,
            message.results,
            message.feeds,
            self.number_feeds(program),
            entries,
            credits=message.credits,
            seconds=self._outbox.seconds,
            is_delegated=is_delegated,
        )

    def number_feeds(self, program: RegisteredProgram) -> int:
        """Return the first of new numbers for the program's feeds between hosts."""
        first = self._next_internal_feed if program.host_feeds else 0
        self._next_internal_feed += program.host_feeds
        return first

    def make_entries(self, session: Session, launch: Launch, traceback_id: int, values: Sequence[int]) -> None:
        """Make the entries of these values of a large launch."""
        program, entries, directory = launch.program, launch.entries, session.directory
        for value in values:
            made = program.values[value - program.arguments]
            entry = entries[value] = Entry(made.hosts, made.nbytes, producer=program.name, traceback_id=traceback_id)
            if made.result >= 0:
                entry.spec = program.result_specs[made.result]
                directory.add(launch.results[made.result], entry)

    def run_again(self, launches: Sequence[Launch]) -> None:
        """Put launches in line again that were sent to hosts that failed, and that had not started there.

        The memory of all of them goes before the first of them asks for some: later ones may have taken it over from
        earlier ones.
        """
        places = [min(node.age for node in launch.nodes) for launch in launches]
        unstarted = [self._completion.withdraw(launch) for launch in launches]
        for launch in launches:
            for entry in launch.entries[launch.program.arguments :]:
                self.memory.release(entry)
        for launch, age, gangs in zip(launches, places, unstarted, strict=True):
            session = self._sessions[launch.session]
            for handle, entry in launch.named_entries():
                if handle not in session.directory.entries:  # it was released, and freed when the last use had started
                    session.directory.add(handle, entry)
            self._make_nodes(session, launch, age)
            for gang in gangs:
                launch.program.waiting -= 1
                self._buffers.drop_uses(session, gang)
        nodes = [node for launch in launches for node in launch.nodes]
        if self._sequential is not None:
            self._sequential.precede(nodes)
        for node in nodes:
            self.scheduler.enqueue(node)

    def await_again(self, launch: Launch, hosts: set[int]) -> None:
        """Have a launch in line wait for all bytes that its client sends to these hosts, which have lost them."""
        feeds = self._sessions[launch.session].feeds
        for node in launch.nodes:
            for gang in node.gangs:
                for host, feed in gang.run.spec.awaited:
                    key = (host, launch.feeds[feed])
                    if host in hosts and key not in feeds.awaited:
                        feeds.awaited[key] = node
                        self.scheduler.lacks(node, Reason.BYTES)

    def reserve_numbers(self, count: int = 1) -> int:
        """The first of so many sequence numbers."""
        self._next_sequence += count
        return self._next_sequence - count

    def session_closed(self, session: Session) -> None:
        """Nothing of the session that has not started will."""
        self.control_flow.session_closed(session.number)
        self._completion.session_closed(session)

    def _is_contended(self, session: Session, program: RegisteredProgram) -> bool:
        """Whether other sessions wait for an island that the program needs."""
        for island in program.islands:  # noqa: SIM110 - by hand: it is on the path of every launch
            if self.scheduler.others_wait(island, session.number):
                return True
        return False

    def make_node(self, session: Session, launch: Launch, unit: Unit, age: int, first: int = 0) -> None:
        """A dispatch unit of the launch gets its node. Notes what it waits for, and the buffers that it needs. Its
        gangs have the numbers from `first` on, or new ones.
        """
        first = first or self.reserve_numbers(len(unit))
        tenant, since = session.tenant, launch.seconds
        node: QueuedNode[GangRun] = QueuedNode(first, session.number, tenant=tenant, age=age, since=since)
        launch.nodes.append(node)
        handles, entries = launch.handles, session.directory.entries
        gangs = []
        for sequence, spec in enumerate(unit, start=first):
            for host, feed in spec.awaited:
                key = (host, launch.feeds[feed])
                if not session.feeds.claim(key):
                    session.feeds.awaited[key] = node
                    node.missing += 1
            # A result that is released before its gang starts must not be freed before it: it is counted, too.
            for position in spec.handles:
                entries[handles[position]].uses += 1
            # An unbounded gang never runs exclusively: it may need results of other gangs.
            exclusive = not (spec.host_call or self._quarantine.suspects.isdisjoint(spec.functions))
            if spec.host_call is HostCallKind.PYTHON:
                session.python_gangs.add(sequence)
            run = GangRun(launch, spec, set(spec.hosts))
            gangs.append(
                Gang(sequence, spec.island, node, run, 0, exclusive, spec.weight, spec.hosts, spec.device_count, spec)
            )
        node.gangs = tuple(gangs)
        program = launch.program
        # On one island, all others are behind the first.
        if program.is_large and (len(launch.nodes) == 1 or len(program.islands) > 1 or program.is_unbounded):
            self.large_plans.hold(program.number, node)
        launch.pending += len(gangs)
        program.waiting += len(gangs)

    def feed_arrived(self, session: Session, host: int, feed: int) -> bool:
        """A client's feed is complete at a host's data port; True where a launch waited for it."""
        node = session.feeds.awaited.pop((host, feed), None)
        if node is None:
            return False
        self.scheduler.arrived(node)
        return True

    def enqueued(self, sequence: int) -> None:
        """A host acknowledges that it has enqueued its part of a gang."""
        gang = self.in_flight.get(sequence)
        if self._sequential is not None and gang is not None:
            self._sequential.enqueued(gang)

    def island_restarted(self, island: int) -> None:
        """The island's hosts have started anew, with nothing on them."""
        self._completion.island_restarted(island)
        self.scheduler.resume(island)

    def release_delayed(self) -> None:
        """Let the launches compete for devices that were delayed by the limits of their tenants, and are due."""
        if self._rates.delayed:
            for node in self._rates.due(self._outbox.seconds):
                self.scheduler.arrived(node)

    def publish_frees(self) -> None:
        """Hosts learn which memory goes, before anything that is sent to them later."""
        self._outbox.flush_frees()
        self.memory.ledger.frees_published()

    # ---- dispatch

    def foremost(self) -> Iterator[Gang[GangRun]]:
        """Return the gangs in flight that have nothing before them on their hosts: the others wait for these."""
        busy: set[int] = set()
        for gang in self.in_flight.values():  # in the order in which they were started
            left = gang.run.hosts_left
            if busy.isdisjoint(left):
                yield gang
            busy |= left

    def start_ready(self) -> None:
        """Starts what the islands have room for."""
        self.delegated_runs.revoke_contended()
        touched = self.scheduler.touched
        while touched:
            island = min(touched)  # any would do; but decisions replay
            touched.discard(island)
            while (gang := self.scheduler.next(island)) is not None:
                self._start(gang)

    def _start(self, gang: Gang[GangRun]) -> None:
        run, launch = gang.run, gang.run.launch
        session = self._sessions.get(launch.session)
        problem = gang_problem(session, gang)
        if problem is not None or session is None:
            self.scheduler.finished(gang)
            self.fail(launch, problem or Status(Code.CANCELLED))
            return
        if self.memory.ledger.is_tight:
            self.publish_frees()
        run.started = True
        run.waited = gang.node.waited_until(self._outbox.seconds)
        self.in_flight[gang.sequence] = gang
        if gang.node.is_delegated:
            self.delegated_runs.start(gang)
            return
        tally = run.tally = self.tallies[gang.island, session.tenant.name]
        tally.waited.observe(self._outbox.seconds - launch.seconds)
        self._dispatch(launch, run.spec.hosts, gang.sequence, run.spec.segments)
        if self._sequential is not None:
            self._sequential.started(gang, len(run.spec.hosts))
        self._completion.gang_left(gang)
        self._buffers.drop_uses(session, gang)

    def _dispatch(self, launch: Launch, hosts: tuple[int, ...], sequence: int, segments: int) -> None:
        """The first message to a host names all that the launch will need there; later ones only what starts.

        Hosts that do the same get the same message: it is made and encoded once.
        """
        begun, handles, outbox = launch.hosts_started, launch.handles, self._outbox
        if begun:
            known: dict[int, list[int]] = {}  # hosts, by the first unit of the run there
            for host in hosts:
                if host in begun:
                    known.setdefault(begun[host], []).append(host)
            for first, some in known.items():
                outbox.dispatch(tuple(some), launch.session, first, sequence, segments)
            hosts = tuple([host for host in hosts if host not in begun]) if known else hosts
        begun.update(dict.fromkeys(hosts, sequence))
        for plan, some_hosts in launch.program.by_plan(hosts):
            run = m.Run(
                sequence,
                launch.session,
                launch.program.number,
                tuple([handles[position] for position in plan.arguments]),
                tuple([handles[position] for position in plan.results]),
                launch.feeds,
                launch.host_feeds,
                self._sequential is not None,
                segments,
            )
            outbox.to_hosts(some_hosts, run)
