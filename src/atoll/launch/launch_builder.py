"""Make the records of launches: the entries of their buffers, their nodes, and the gangs of the nodes.

This module enqueues and sends nothing: `launch_queue` and `gang_starts` do that.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.launch.large_plans import LargePlans
from atoll.launch.scheduler import Scheduler
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import HOST_FEEDS
from atoll.state.buffer_directory import NO_ENTRY, Entry
from atoll.state.dispatch_units import Unit
from atoll.state.launch_states import LaunchState
from atoll.state.programs import RegisteredProgram
from atoll.state.quarantine import Quarantine
from atoll.state.queued_nodes import Gang, HostCallKind, QueuedNode
from atoll.state.session import GangRun, Launch, Session


class LaunchBuilder:
    """Makes launches, and numbers their gangs and feeds. `joins` permits the joining of short nodes."""

    def __init__(
        self, scheduler: Scheduler[GangRun], quarantine: Quarantine, large_plans: LargePlans, *, joins: bool
    ) -> None:
        self._scheduler = scheduler
        self._quarantine = quarantine
        self._large_plans = large_plans
        self._joins = joins
        self._next_sequence = 1
        self._next_feed = HOST_FEEDS.start

    def reserve_numbers(self, count: int = 1) -> int:
        """Reserve sequence numbers for gangs. Return the first."""
        self._next_sequence += count
        return self._next_sequence - count

    def reserve_feeds(self, program: RegisteredProgram) -> int:
        """Reserve numbers for the program's feeds between hosts. Return the first."""
        if not program.host_feeds:
            return 0
        self._next_feed += program.host_feeds
        return self._next_feed - program.host_feeds

    def launch(
        self,
        session: Session,
        program: RegisteredProgram,
        message: m.Launch,
        seconds: float,
        state: LaunchState = LaunchState.ACTIVE,
        *,
        results_exist: bool = False,
    ) -> Launch:
        """Make a launch, and the entries of the values that it makes.

        A delegated launch has only the entries of its results. The entries of a large launch are made later, in steps.
        If `results_exist` is true, the handles of the results have entries, which the launch uses.
        """
        present = session.directory.entries
        entries = [present[handle] for handle in message.arguments]
        entries += [NO_ENTRY] * len(program.values)
        launch = Launch(
            session.number,
            program,
            message.arguments,
            message.results,
            message.feeds,
            self.reserve_feeds(program),
            entries,
            credits=message.credits,
            seconds=seconds,
            state=state,
            contents=message.contents,
        )
        if state is LaunchState.BEGINNING:
            return launch
        made: Sequence[int] = range(program.arguments, len(entries))
        if results_exist:
            made = program.inner_values
            for value in program.result_values:
                entries[value] = present[launch.results[program.values[value - program.arguments].result]]
        elif state is LaunchState.DELEGATED:
            made = program.result_values
        self.make_entries(session, launch, message.traceback_id, made)
        return launch

    def make_entries(self, session: Session, launch: Launch, traceback_id: int, values: Sequence[int]) -> None:
        """Make the entries of these values, and add those of results to the session's directory."""
        program, entries, directory = launch.program, launch.entries, session.directory
        name, first, specs, results = program.name, program.arguments, program.result_specs, launch.results
        named, nbytes = directory.entries, 0
        for value in values:
            made = program.values[value - first]
            entry = entries[value] = Entry(made.hosts, made.nbytes, producer=name, traceback_id=traceback_id)
            if made.result >= 0:
                entry.spec = specs[made.result]
                named[results[made.result]] = entry
                nbytes += made.nbytes
        directory.nbytes += nbytes

    # ---- nodes

    def may_join(self, session: Session, program: RegisteredProgram) -> bool:
        """Return whether short nodes of a launch are joined: not if other sessions wait for the same islands."""
        if not self._joins or self._quarantine.suspects:
            return False
        return not self._scheduler.others_wait_for(program.islands, session.number)

    def make_nodes(self, session: Session, launch: Launch, age: int = -1) -> Sequence[Unit]:
        """Make the nodes of a launch. Return its dispatch units."""
        program = launch.program
        units = program.units.next_launch(may_join=len(program.nodes) > 1 and self.may_join(session, program))
        for unit in units:
            self.make_node(session, launch, unit, age)
        for i in program.donated:
            launch.entries[i].consume()
        return units

    def make_node(self, session: Session, launch: Launch, unit: Unit, age: int, first: int = 0) -> None:
        """Make the node of a dispatch unit, and note what it waits for and which buffers it needs.

        Its gangs have the numbers from `first` on, or new ones.
        """
        first = first or self.reserve_numbers(len(unit))
        tenant, since = session.tenant, launch.seconds
        node: QueuedNode[GangRun] = QueuedNode(first, session.number, tenant=tenant, age=age, since=since)
        if len(unit) > 1:
            spec = unit[0]
            node.starts_together = (spec.collective and not spec.is_apart) or spec.runs_together
        launch.nodes.append(node)
        handles, entries, suspects = launch.handles, session.directory.entries, self._quarantine.suspects
        gangs = []
        for sequence, spec in enumerate(unit, start=first):
            for key in launch.awaited_by(spec) if spec.awaited else ():
                if not session.feeds.claim(key):
                    session.feeds.awaited[key] = node
                    node.missing += 1
            # Results are also counted, so that a result that is released early is not freed before its gang starts.
            for position in spec.handles:
                entries[handles[position]].uses += 1
            # An unbounded gang never runs exclusively: it may need results of other gangs.
            call, hosts = spec.host_call, spec.hosts
            exclusive = bool(suspects) and not (call or suspects.isdisjoint(spec.functions))
            if call is HostCallKind.PYTHON:
                session.python_gangs.add(sequence)
            run, devices = GangRun(launch, spec, set(hosts)), spec.device_count
            gang = Gang(sequence, spec.island, node, run, 0, exclusive, spec.weight, hosts, devices, spec)
            if spec.islands:
                gang.islands, gang.places, gang.devices = spec.islands, spec.places, devices // len(spec.islands)
            gangs.append(gang)
        node.gangs = tuple(gangs)
        program = launch.program
        # On one island, all other nodes are behind the first.
        if program.is_large and (len(launch.nodes) == 1 or len(program.islands) > 1 or program.is_unbounded):
            self._large_plans.hold(program.number, node)
        launch.pending += len(gangs)
        program.waiting += len(gangs)
