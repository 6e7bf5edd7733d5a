"""Delegate launches to hosts: all gangs of a delegated run are granted at once, in one message per host.

If no other session uses the islands of a launch, its gangs run in the order of the plan, and the controller has nothing
to decide between them. So the launch is one queued node. Its gang on each island stands for all gangs of the launch
there, and reserves the most memory that they ever need. The hosts start one gang after another by themselves
(`worker.delegated_run_dispatcher`). When another session has a ready node on one of the islands, the run is *revoked*
(`launch.run_revocations`), and limited to the segments that its hosts have started. The rest of the launch is then
enqueued node by node, like any other launch.

Invariants:

- Hosts start either all gangs of a node or none, and on each island a prefix of its gangs. So a started gang waits for
  nothing that is still in line.
- Later launches of the session wait until the run is over on their island, or until its rest is in line. So the order
  of the session is kept.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.errors import invalid
from atoll.launch.delegated_programs import delegated_program
from atoll.launch.delegated_run_records import DelegatedRun, DelegatedRunIndex, Revocation
from atoll.launch.launch_ends import LaunchEnds
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.delegated_parts import DelegatedProgram, IslandPart, NotDelegated
from atoll.state.gang_states import GangState
from atoll.state.launch_states import LaunchState
from atoll.state.programs import RegisteredProgram
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.session import GangRun, Launch, Session

# Calls that may be in flight on a host, with memory: as many as if long gangs were dispatched one by one, and for short
# gangs as many as keep the host busy.
_AHEAD, _AHEAD_OF_SHORT = 2, 12


class DelegatedRuns:
    """Delegates launches, and handles their ends.

    A launch is delegated if no other session has started anything on its islands for the `delegate_after_seconds` of
    the settings. If these are None, no launch is delegated. `revocations` has the revocations under way, by session:
    `RunRevocations` adds and removes them.
    """

    def __init__(self, shared: SharedState, parts: SharedParts, *, ends: LaunchEnds) -> None:
        self._builder, self._buffers, self._charges = parts.builder, parts.buffers, parts.charges
        self._large_plans = parts.large_plans
        self._uses, self._ends = parts.uses, ends
        self._resources = shared.resources
        self._sessions = shared.sessions
        self._outbox = shared.outbox
        self._quarantine = shared.quarantine
        self._scheduler, self._memory, self._in_flight = parts.scheduler, parts.reservations, parts.in_flight
        self._exclusive_after = shared.settings.delegate_after_seconds
        self._runs: dict[int, DelegatedRun] = {}  # by number
        self._index = DelegatedRunIndex()
        self.revocations: dict[int, Revocation] = {}  # by session

    # ---- start

    def program_of(self, session: Session, program: RegisteredProgram) -> DelegatedProgram | None:
        """Return the delegated program to launch now, or None if the launch is to be enqueued node by node."""
        settings, exclusive_after = session.tenant.settings, self._exclusive_after
        if exclusive_after is None or program.delegated is NotDelegated.IMPOSSIBLE:
            return None
        if self._quarantine.suspects or settings.memory or settings.total_memory:
            return None
        if any(
            self._scheduler.seconds_without_others(each, session.number) < exclusive_after for each in program.islands
        ):
            return None
        known: DelegatedProgram | NotDelegated = program.delegated
        if known is NotDelegated.UNKNOWN:
            known = self._delegated_program(program, _AHEAD)
        elif isinstance(known, DelegatedProgram) and known.ahead == _AHEAD and known.is_short:
            known = self._delegated_program(program, _AHEAD_OF_SHORT)
        program.delegated = known
        return known if isinstance(known, DelegatedProgram) else None

    def _delegated_program(self, program: RegisteredProgram, ahead: int) -> DelegatedProgram | NotDelegated:
        weight = max(1, min(self._scheduler.statistics(island).window for island in program.islands) // 2)
        found = delegated_program(program, lambda i: len(self._resources.hosts_of(i)), min(ahead, weight), weight)
        return found or NotDelegated.IMPOSSIBLE

    def line_up(self, session: Session, launch: Launch, program: DelegatedProgram) -> None:
        """Enqueue one node for the whole launch, and note the buffers that it needs."""
        first = self._builder.reserve_numbers(program.gangs)
        node: QueuedNode[GangRun] = QueuedNode(
            first, session.number, tenant=session.tenant, since=launch.seconds, is_delegated=True
        )
        gangs = {}
        for island, part in program.parts.items():
            for position in part.whole.handles:
                session.directory.entries[launch.handles[position]].uses += 1
            spec = part.whole
            run = GangRun(launch, spec, set(spec.hosts))
            number = first + part.each.numbers[0]
            gangs[island] = Gang(
                number, island, node, run, 0, weight=program.weight, hosts=spec.hosts, devices=spec.device_count
            )
        node.gangs = tuple(gangs.values())
        for position in launch.program.donated:
            launch.entries[position].consume()
        launch.nodes.append(node)
        launch.pending += len(gangs)
        launch.program.waiting += len(gangs)
        delegated = self._runs[first] = DelegatedRun(launch, program, first, gangs, len(gangs))
        self._index.add(delegated)
        if launch.program.is_large:
            self._large_plans.hold(launch.program.number, node)
        self._scheduler.enqueue(node)

    def line_up_instead(self, node: QueuedNode[GangRun]) -> bool:
        """Put a launch in line node by node if its run may not be committed. Return whether this was done.

        These nodes take the place of the node that stands for the launch, which is dropped.
        """
        if self._may_be_committed(node):
            return False
        run = self._runs[node.number]
        run.make_entries()
        self._launch_rest(run, dict.fromkeys(run.gangs, 0))
        self._scheduler.drop(node)
        for gang in node.gangs:
            self._end_gang(gang)
        return True

    def _may_be_committed(self, node: QueuedNode[GangRun]) -> bool:
        """Return whether a run may be committed: no other session wants an island, and there is enough memory.

        Its gangs then need the memory that the run before it does not already have.
        """
        run = self._runs[node.number]
        session = node.session
        for island, gang in run.gangs.items():
            part, before = run.program.parts[island], self._before(run, island)
            if before is part:
                gang.run.spec = part.successor
            elif before is not None:
                gang.run.spec = replace(part.whole, scratch=part.memory.behind(before.memory))
        return (
            not self._quarantine.suspects
            and session not in self.revocations
            and not self._index.has_limited(session)
            and not any(self._scheduler.seconds_without_others(island, session) < 0 for island in run.gangs)
            and self._memory.ledger.lacking(*(gang.run.spec.scratch for gang in run.gangs.values())) is None
            and all(self._has_memory(run.launch, part) for part in run.program.parts.values())
        )

    def _before(self, run: DelegatedRun, island: int) -> IslandPart | None:
        """Return the island's part of the session's last committed run that has not ended there."""
        committed = self._index.committed(run.launch.session, island)
        return committed[-1].program.parts[island] if committed else None

    def _grow(self, island: int, session: int) -> None:
        """Reserve all of the memory for the session's next run on the island, after the end of the run before it."""
        committed = self._index.committed(session, island)
        if not committed:
            return
        run = committed[0]
        gang, whole = run.gangs[island], run.program.parts[island].whole
        will_run = run.limits is None or run.limits[island]
        if gang.run.spec is not whole and will_run:
            gang.run.spec = whole
            self._memory.grow(gang)

    def _has_memory(self, launch: Launch, part: IslandPart) -> bool:
        """Return whether the arguments that the part consumes have their memory, or will get it from delegated runs."""
        entries, (host,) = launch.entries, part.whole.hosts
        return all(
            self._memory.has_memory_on(host, entries[number]) or not (entries[number].ready or entries[number].blocks)
            for number in part.lost
        )

    def start(self, gang: Gang[GangRun]) -> None:
        """Grant the run on the gang's island, which can take it, unless a revocation decides that first."""
        run = self._runs[gang.node.number]
        if gang.state is GangState.COMMITTED:
            gang.enter(GangState.HELD)
        if run.limits is None and gang.node.session in self.revocations:
            return
        limit = len(run.program.parts[gang.island].gangs) if run.limits is None else run.limits[gang.island]
        if not limit:
            self._end_part(run, gang)
            return
        gang.enter(GangState.GRANTED)
        launch, (host,) = run.launch, gang.run.spec.hosts
        plan = launch.program.plans[host]
        launch.hosts_started[host] = gang.sequence
        self._outbox.to_host(
            host,
            m.Run(
                gang.sequence,
                launch.session,
                launch.program.number,
                tuple([launch.handles[position] for position in plan.arguments]),
                tuple([launch.handles[position] for position in plan.results]),
                (),
                launch.host_feeds,
                segments=limit,
                ahead=run.program.ahead,
                sampled=run.program.parts[gang.island].sample_places,
            ),
        )

    # ---- limits, after a revocation

    def committed(self, session: int) -> list[DelegatedRun]:
        """Return the session's committed runs that have no limit yet and have not failed, in order."""
        return [
            run
            for run in self._index.of(session)
            if run.launch.error is None and run.limits is None
            if next(iter(run.gangs.values())).state >= GangState.COMMITTED
        ]

    def under_way(self, gang: Gang[GangRun]) -> set[int]:
        """Return the hosts to which the gang was granted, and that have not ended it."""
        return gang.run.hosts_left if gang.state is GangState.GRANTED else set()

    def limit(self, session: int, limits: Sequence[tuple[DelegatedRun, dict[int, int]]]) -> None:
        """Limit runs of the session to so many segments on each island, and have their hosts continue up to there."""
        for run, of_islands in limits:
            self._index.limit(run, of_islands)
            run.make_entries()
        self._send_limits(session, [run for run, _ in limits])

    def _send_limits(self, session: int, runs: Sequence[DelegatedRun]) -> None:
        """Send the hosts that wait for it the number of segments that they run by themselves."""
        by_host: dict[int, list[tuple[int, int]]] = {}
        for run in runs:
            for island, gang in run.gangs.items():
                if self.under_way(gang):
                    limit = len(run.program.parts[island].gangs) if run.limits is None else run.limits[island]
                    by_host.setdefault(gang.hosts[0], []).append((gang.sequence, limit))
        for host, limited in by_host.items():
            self._outbox.to_host(host, m.SetRunLimit(session, tuple(limited)))

    def continue_limited(self, run: DelegatedRun) -> None:
        """Start the gangs of a limited run that were held until its limits were known."""
        for gang in run.gangs_in(GangState.HELD):
            self.start(gang)
        self._continue_if_revoked(run)  # all of its islands may be lost

    def island_lost(self, run: DelegatedRun, island: int) -> None:
        """Handle that an island has lost its gang of a run before any of it had started there."""
        gang = run.gangs[island]
        if gang.state not in (GangState.HELD, GangState.GRANTED):
            return
        if run.limits is not None:
            self._end_part(run, gang)
            return
        gang.run.hosts_left.clear()
        self._leave_island(run, gang)
        gang.enter(GangState.REVOKED)

    def has_begun(self, launch: Launch, island: int) -> bool:
        """Return whether the island's host may have started a gang of the launch."""
        run = self._runs[launch.nodes[0].number]
        gang = run.gangs[island]
        granted = run.limits is not None and run.limits[island] > 0
        has_ended = run.has_ended(island) and gang.state is not GangState.REVOKED
        return granted or has_ended or gang.run.device_ns > 0

    def to_continue_on(self, island: int) -> list[Launch]:
        """Return the launches of revoked runs whose rest needs the island, and is not in line yet.

        Hosts of other islands have not ended their parts, or have not answered how far they are.
        """
        found = []
        for run in self._runs.values():
            gang = run.gangs.get(island)
            if gang is None or gang.state is not GangState.REVOKED:
                continue
            ended = 0 if run.limits is None else run.limits[island]
            if ended < len(run.program.parts[island].gangs):
                found.append(run.launch)
        return found

    def _launch_rest(self, run: DelegatedRun, limits: dict[int, int]) -> None:
        """Enqueue the nodes beyond these segments."""
        units = run.rest(limits)
        for island, gang in run.gangs.items():
            if not limits[island]:
                run.launch.hosts_started.pop(gang.hosts[0], None)
        launch, session = run.launch, self._sessions[run.launch.session]
        launch.nodes = []
        launch.enter(LaunchState.ACTIVE)
        for first, unit in units:
            self._builder.make_node(session, launch, unit, run.first, first)
        for node in launch.nodes:
            self._scheduler.enqueue(node)

    # ---- ends

    def progressed(self, host: int, message: m.RunProgress) -> None:
        """Charge gangs of a run that have ended on a host. Raise INVALID_ARGUMENT if the report is impossible."""
        gang = self._in_flight.get(message.sequence)
        if gang is None or host not in gang.run.hosts_left:
            return
        run = self._runs.get(gang.node.number) if gang.node.is_delegated else None
        if run is None:
            raise invalid(f"gang {message.sequence} does not belong to a delegated run")
        self._charges.progressed(gang, run.program, run.first, message)
        if message.is_over:
            gang.run.hosts_left.clear()
            self._end_part(run, gang)

    def _end_part(self, run: DelegatedRun, gang: Gang[GangRun]) -> None:
        gang.run.hosts_left.clear()
        if gang.run.failure is not None and run.launch.error is None:
            return  # `Failures` decides soon whether it has failed by itself
        if run.limits is None or run.launch.error is not None or run.launch.session not in self._sessions:
            self._leave_island(run, gang)
            if run.launch.error is None:
                self._hold_results(run, gang)
            self._end_gang(gang)  # also lets the next run grow
            return
        self._leave_island(run, gang)
        part = run.program.parts[gang.island]
        self._memory.run_through(gang, part.gangs[: run.limits[gang.island]])
        self._grow(gang.island, run.launch.session)
        gang.enter(GangState.REVOKED)
        self._continue_if_revoked(run)

    def _continue_if_revoked(self, run: DelegatedRun) -> None:
        """Enqueue the rest of a limited run if its parts on all islands have ended or were lost."""
        if run.ending and run.limits is not None and len(run.gangs_in(GangState.REVOKED)) == run.ending:
            self._launch_rest(run, run.limits)
            self._end_revoked(run)

    def _leave_island(self, run: DelegatedRun, gang: Gang[GangRun]) -> None:
        """Release the gang's place and memory on its island, after its hosts have ended it."""
        del self._in_flight[gang.sequence]
        self._scheduler.finished(gang, run.shared_ns(gang))
        self._memory.ended(gang)

    def _hold_results(self, run: DelegatedRun, gang: Gang[GangRun]) -> None:
        part = run.program.parts[gang.island]
        self._memory.hold_results(gang, part.results, part.lost)

    def _end_revoked(self, run: DelegatedRun) -> None:
        """End the gangs that were revoked."""
        for gang in run.gangs_in(GangState.REVOKED):
            self._end_gang(gang)

    def end_failed_gang(self, gang: Gang[GangRun]) -> None:
        """End a gang of a failed launch. Its hosts report nothing more about it."""
        if gang.sequence in self._in_flight:
            self._end_part(self._runs[gang.node.number], gang)

    def _end_gang(self, gang: Gang[GangRun]) -> None:
        if gang.keeps_order:
            gang.enter(GangState.DONE if gang.run.launch.error is None else GangState.FAILED)
            self._scheduler.delegated_run_ended(gang)
        session = self._sessions.get(gang.run.launch.session)
        self._uses.gang_left_line(gang)
        if session is not None:
            self._buffers.drop_uses(session, gang)
        self.count_ended(gang)
        self._ends.count_ended_gang(gang.run.launch)

    def count_ended(self, gang: Gang[GangRun]) -> None:
        """Count a gang that has ended, that never starts, or whose rest is in line. Forget the run after the last."""
        run = self._runs[gang.node.number]
        run.ending -= 1
        self._index.gang_ended(run, gang.island, is_last=not run.ending)
        self._grow(gang.island, run.launch.session)
        if not run.ending:
            del self._runs[gang.node.number]
            gang.node.end()

    def run_of(self, launch: Launch) -> DelegatedRun | None:
        """Return the delegated run of a launch, or None if the launch has none that has not ended."""
        run = self._runs.get(launch.nodes[0].number) if launch.nodes else None
        return run if run is not None and run.launch is launch else None

    def others(self, run: DelegatedRun) -> list[DelegatedRun]:
        """Return the other runs of the same session, in order."""
        return [each for each in self._index.of(run.launch.session) if each is not run]

    def launch_failed(self, run: DelegatedRun, others: Sequence[DelegatedRun]) -> None:
        """Have hosts drop the run of a failed launch, and do not enqueue the rest of it.

        The hosts do not begin the `others` of the session until they have received the limits of these.
        """
        session = run.launch.session
        for gang in run.gangs.values():
            for host in self.under_way(gang):
                if not self._resources.has_failed(host):
                    self._outbox.to_host(host, m.DropRun(session, gang.sequence))
        if session not in self.revocations:
            self._send_limits(session, [each for each in others if each.launch.error is None])
        for gang in run.gangs_in(GangState.HELD):
            self._end_part(run, gang)
        self._end_revoked(run)

    def session_closed(self, session: int) -> list[Gang[GangRun]]:
        """End the gangs of a closed session's runs that are not in flight. Return the others, which hosts drop."""
        runs = self._index.of(session)
        for run in runs:
            for gang in run.gangs_in(GangState.HELD):
                self._end_part(run, gang)
            self._end_revoked(run)
        return [gang for run in runs for gang in run.gangs.values() if gang.sequence in self._in_flight]

    # ---- index

    def index_runs(self) -> None:
        """Make the index of the runs again, which is not stored."""
        self._index = DelegatedRunIndex()
        for run in self._runs.values():
            self._index.restore(run)

    def validate(self) -> None:
        """Raise AssertionError if the index differs from the runs. For tests."""
        self._index.validate(self._runs.values())
