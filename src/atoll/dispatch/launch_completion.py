"""How launches end: hosts report the ends of gangs, and launches fail.

A gang leaves its island when all of its hosts have ended their parts, and a launch is done when all of its gangs have
left. Where one fails, those of its launch that have not started fail with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.cluster.resources import ResourceManager
from atoll.dependencies.delegated_runs import DelegatedRuns
from atoll.dependencies.dependency_tracker import DependencyTracker
from atoll.dependencies.sequential import SequentialDispatch
from atoll.dispatch.buffer_releases import BufferReleases
from atoll.dispatch.large_launches import LARGE_NODES
from atoll.dispatch.outbox import Outbox
from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.scheduling.device_clocks import DeviceClocks
from atoll.scheduling.feeds import Key
from atoll.scheduling.gangs import GangSpec
from atoll.scheduling.long_gangs import settled
from atoll.scheduling.programs import RegisteredProgram
from atoll.scheduling.quarantine import Quarantine
from atoll.scheduling.queued_nodes import Gang, HostCallKind, QueuedNode
from atoll.scheduling.remains import Remains
from atoll.scheduling.reservations import Reservations
from atoll.scheduling.scheduler import Scheduler
from atoll.scheduling.session import GangRun, Launch, Session
from atoll.scheduling.tallies import TRANSFERS
from atoll.telemetry.trace import Trace

# Buffers of a closed session that are released in one step of a flush.
_ENTRIES_PER_STEP = 4


class LaunchCompletion:
    """The gangs that are in flight, until they end; and the launches that fail.

    `on_program_idle(program)` is called when the last gang of a released program has started, or will not. `sequential`
    is None where gangs are dispatched in parallel.
    """

    def __init__(
        self,
        resources: ResourceManager,
        sessions: dict[int, Session],
        outbox: Outbox,
        scheduler: Scheduler[GangRun],
        dependencies: DependencyTracker[GangRun],
        memory: Reservations,
        buffers: BufferReleases,
        quarantine: Quarantine,
        on_program_idle: Callable[[RegisteredProgram], None],
        sequential: SequentialDispatch[GangRun] | None,
        remains: Remains,
    ) -> None:
        self.in_flight: dict[int, Gang[GangRun]] = {}  # by sequence
        self.trace = Trace()
        self.on_part_ended: Callable[[Launch], None]  # of control flow
        self.on_large_end: Callable[[Launch], None]  # frees the memory of inner values, and what nodes refer to
        self._resources = resources
        self._sessions = sessions
        self._outbox = outbox
        self._scheduler = scheduler
        self._dependencies = dependencies
        self._memory = memory
        self._buffers = buffers
        self._quarantine = quarantine
        self._on_program_idle = on_program_idle
        self._sequential = sequential
        self._remains = remains
        self.clocks = DeviceClocks()
        self.delegated_runs: DelegatedRuns  # to be set

    # ---- gangs

    def runs_ended(self, hosts: tuple[int, ...], sequence: int, times: tuple[int, ...]) -> None:
        """Hosts have ended their parts of a gang.

        `times` has for each its dispatch there and its end, in nanoseconds of the host's clock.
        """
        gang = self.in_flight.get(sequence)
        if gang is None:
            return
        run = gang.run
        left = run.hosts_left
        if not left.issuperset(hosts):
            for position, host in enumerate(hosts):
                if host in left and len(hosts) > 1:
                    self.runs_ended((host,), sequence, times[2 * position : 2 * position + 2])
            return
        self.trace.record_gang(gang, hosts, times)
        if not run.spec.host_call:
            busy, longest = self.clocks.ended(hosts, run.spec.devices, times, run.spec.computes)
            if longest > run.duration:
                run.duration = longest
            run.device_ns += busy
            account = run.launch.program.account
            account.device_ns += settled(run, busy) if run.advance_ns else busy
            if account.is_idle:
                account.wake()
        left.difference_update(hosts)
        if not left:
            self._all_ended(gang)

    def rows_moved(self, host: int, message: m.RowsMoved) -> None:
        gang = self.in_flight.get(message.sequence)
        if gang is not None and host in gang.run.hosts_left:
            gang.run.note_rows(host, message.sent, message.received)

    def run_failed(self, host: int, sequence: int, failure: Status) -> None:
        """A host's part of a gang has failed."""
        gang = self.in_flight.get(sequence)
        if gang is None or host not in gang.run.hosts_left:
            self._outbox.to_host(host, m.CollectiveEnded(sequence))  # it may have been one
            return
        if gang.run.spec.collective:
            gang.run.left_out += (host,)
        if not gang.node.is_delegated:  # of which others are in flight there
            gang.run.hosts_left.discard(host)
        if self._may_be_of_another_host(gang, failure):
            # The loss of that host is reported soon, and names the cause.
            gang.run.failure = gang.run.failure or failure
        else:
            self.fail(gang.run.launch, failure)
        if not gang.run.hosts_left:
            self._all_ended(gang)

    def _all_ended(self, gang: Gang[GangRun]) -> None:
        run = gang.run
        for host in run.left_out:
            self._outbox.to_host(host, m.CollectiveEnded(gang.sequence))
        run.left_out = ()
        if run.failure is not None and run.launch.error is None:
            return
        if run.launch.error is None:
            run.spec.observe(run.duration)
            run.launch.program.account.bytes_moved += run.spec.moved + run.received
            if gang.exclusive:
                for name in run.spec.functions:
                    self._quarantine.ended_well(name)
        self.finish(gang)

    def _may_be_of_another_host(self, gang: Gang[GangRun], failure: Status) -> bool:
        """Whether the loss of another host may be what failed a gang on this one."""
        if gang.run.spec.collective or failure.code == Code.UNAVAILABLE:
            return True
        launch = gang.run.launch
        # What it reads may be made together with others, and be broken before that is known to be.
        reads_unready = any(not entry.ready for entry in launch.entries[: len(launch.arguments)])
        return len(self._resources.hosts_of(gang.island)) > 1 and (reads_unready or len(launch.nodes) > 1)

    def finish(self, gang: Gang[GangRun]) -> None:
        """A gang that was started has left its island, with or without success; its session is charged for it."""
        if gang.node.is_delegated:
            self.delegated_runs.finish(gang)
            return
        self.in_flight.pop(gang.sequence, None)
        if self._sequential is not None:
            self._sequential.ended(gang)
        run = gang.run
        launch, tally = run.launch, run.tally
        if tally is not None:
            tally.ended(run.duration, run.device_ns, launch.error is None)
            if run.spec.kind in TRANSFERS and launch.error is None:
                tally.move(run.spec.kind, run.moved(run.spec.hosts))
        self._scheduler.finished(gang, run.device_ns)
        self._memory.ended(gang)
        dependency = gang.node.dependency
        if dependency is not None and all(other.run.started and not other.run.hosts_left for other in gang.node.gangs):
            self._dependencies.resolve(dependency)
        self.gang_ended(launch)

    def gang_left(self, gang: Gang[GangRun]) -> None:
        """A gang has started, or never will."""
        program, session = gang.run.launch.program, self._sessions.get(gang.run.launch.session)
        if gang.run.spec.host_call is HostCallKind.PYTHON and session is not None:
            session.python_gangs.discard(gang.sequence)
        program.waiting -= 1
        self.drop_if_idle(program)

    def drop_if_idle(self, program: RegisteredProgram) -> None:
        """One that needs the program less."""
        if program.released and not program.waiting:
            self._on_program_idle(program)

    def island_restarted(self, island: int) -> None:
        """The island's hosts have started anew, and so have their clocks."""
        for host in self._resources.hosts_of(island):
            self.clocks.forget(host)
            self.trace.clock_began(host)

    # ---- launches

    def gang_ended(self, launch: Launch) -> None:
        launch.pending -= 1
        if not launch.pending:
            self.launch_done(launch)
            if len(launch.program.nodes) > LARGE_NODES:
                self.on_large_end(launch)
                return
            for node in launch.nodes:
                node.end()

    def launch_done(self, launch: Launch) -> None:
        """All gangs of the launch have ended: its results are ready, or errors."""
        session = self._sessions.get(launch.session)
        if launch.error is not None or session is None:
            for entry in launch.entries[launch.program.arguments :]:
                self._memory.release(entry)
        elif not launch.is_delegated and len(launch.program.nodes) <= LARGE_NODES:
            for value in launch.program.inner_values:
                self._memory.release(launch.entries[value])
        if launch.dependency is not None:
            for node in launch.nodes:
                if node.dependency is not None:
                    self._dependencies.resolve(node.dependency)
        if session is None:
            return
        for handle in launch.results:
            self._buffers.settle(session, handle, launch.error)
        if launch.credits:
            self.end_credits(session, launch.credits)
        if launch.part_of is not None:
            self.on_part_ended(launch)
        if launch.then is not None:
            launch.then(launch)

    def end_credits(self, session: Session, credits: int) -> None:
        """A launch of the client's that took these has ended."""
        session.launch_ended(credits)
        self._outbox.return_credits(session.number, credits, may_wait=session.credits > 0)

    def withdraw(self, launch: Launch) -> list[Gang[GangRun]]:
        """Take a launch back that was sent to hosts that failed, as if none of it had started.

        Returns the gangs that had not been sent: they still count as waiting, and as users of their buffers.
        """
        gangs = [gang for node in launch.nodes for gang in node.gangs]
        for node in launch.nodes:
            self._scheduler.drop(node)
            self._memory.dropped(node)
            if self._sequential is not None:
                self._sequential.withdraw(node)
        for gang in gangs:
            if gang.run.started:
                del self.in_flight[gang.sequence]
                if gang.run.tally is not None:
                    gang.run.tally.ended(0, 0, False)
                self._scheduler.finished(gang)
                self._memory.ended(gang)
        for node in launch.nodes:
            node.end()
        launch.nodes, launch.pending = [], 0
        launch.hosts_started.clear()
        return [gang for gang in gangs if not gang.run.started]

    def fail(self, launch: Launch, status: Status) -> None:
        """A launch fails: what of it has not started will not, and nothing new may use its results."""
        if launch.error is not None:
            return
        launch.error = status
        session = self._sessions.get(launch.session)
        if session is not None:
            session.has_errors = True
            session.directory.fail(launch.results, status)
        gangs = [gang for node in launch.nodes for gang in node.gangs]
        for node in launch.nodes:
            self._scheduler.drop(node)
            self._memory.dropped(node)
        unstarted = [gang for gang in gangs if not gang.run.started]
        for gang in gangs:
            self._fail_incoming(gang, status)
        for host in {host for gang in unstarted for host in gang.run.spec.hosts}:
            if host in launch.hosts_started and not self._resources.has_failed(host):
                self._outbox.to_host(host, m.DropRun(launch.session, launch.hosts_started[host]))
        for gang in unstarted:
            gang.run.started = True
            self.gang_left(gang)
            if session is not None:
                self.refuse_feeds(session, [gang.run.spec], launch.feeds, taken=True)
                self._buffers.drop_uses(session, gang)
            if gang.node.is_delegated:
                self.delegated_runs.over(gang)
        self.delegated_runs.failed(launch)
        if self._sequential is not None:
            for node in launch.nodes:
                self._sequential.finish(node)
        for _ in unstarted:
            self.gang_ended(launch)

    def session_closed(self, session: Session) -> None:
        """Gangs of the session that have not started will not, and its memory goes."""
        session.tenant.ended(session.in_flight)
        self._dependencies.forget(session.number)
        if self._sequential is not None:
            self._sequential.forget(session.number)
        nodes = self._scheduler.drop_session(session.number)
        for node in nodes:
            self._memory.dropped(node)
        later = [node for node in nodes if not node.is_delegated]
        for node in nodes:
            if node.is_delegated:
                self._end_node(node)
        self._remains.release_in_steps(session, later, self._end_node)
        for gang in self.delegated_runs.session_closed(session.number):
            self._fail_incoming(gang, _ended(session.number))  # its hosts stop, each somewhere
        # After the nodes: their inputs have the memory again that these were to take over from them.
        self._remains.release_in_steps(session, session.directory.entries, self._memory.release, _ENTRIES_PER_STEP)

    def _end_node(self, node: QueuedNode[GangRun]) -> None:
        """End the gangs of a closed session's node, as far as they have not started."""
        for gang in node.gangs:
            if gang.run.started:
                self._fail_incoming(gang, _ended(node.session))  # from the parts that will not start
            else:
                gang.run.started = True
                self.gang_left(gang)
                if node.is_delegated:
                    self.delegated_runs.over(gang)
                self.gang_ended(gang.run.launch)

    # ---- bytes on their way

    def _fail_incoming(self, gang: Gang[GangRun], status: Status) -> None:
        """Its hosts must not wait for what others would have sent them, nor keep what arrives all the same."""
        if gang.run.started and not gang.run.hosts_left:
            return
        for host, feeds in gang.run.incoming():
            if not self._resources.has_failed(host):
                self._outbox.to_host(host, m.FailFeeds(gang.node.session, feeds, status))

    def refuse_feeds(
        self, session: Session, gangs: Sequence[GangSpec], feeds: tuple[int, ...], taken: bool = False
    ) -> None:
        """Drops the client's bytes for gangs that will not run: those that have arrived, and those on their way.

        With `taken`, the launch has noted which it still awaits.
        """
        for gang in gangs:
            for host, feed in gang.awaited:
                if feed >= len(feeds):
                    continue
                key: Key = (host, feeds[feed])
                has_arrived = taken and key not in session.feeds.awaited
                if has_arrived or session.feeds.refuse(key):
                    self._outbox.to_host(host, m.DropFeed(session.number, key[1]))


def _ended(session: int) -> Status:
    return Status(Code.CANCELLED, f"session {session} has ended")
