"""Fail the launches that cannot end, after the failure of an island or host, or if they wait for memory in vain.

A launch survives the failure of an island if everything that it needs still exists, and if it had not started:

- No argument was stored on the island, except results of other surviving launches, which are made again.
- Bytes that the client sends to the island's hosts are sent again. The proxy confirms that when it acknowledges the
  failure.
- The launch is in line, or all of it was sent to this island, and none of its gangs had ended or could have been
  running. The first gang in flight on a device could have been running; the others waited behind it.

A launch in line stays there. A launch that was sent joins the lines again, at its former position before its session's
later launches. It takes part in no transfer to another island, so no other host knows it. Launches that were sent do
not survive if they call Python or are part of control flow.

A delegated run was sent to several islands at once. It may survive if it was behind another run on the island.
`run_revocations` asks the hosts of its other islands, and the run joins the lines if none of them has begun it.

`survivors` decides about each launch.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping

from atoll.errors import Status
from atoll.launch.launch_checks import gang_problem
from atoll.launch.launches import Launches
from atoll.launch.shared_state import SharedState
from atoll.launch.survivors import Survivors
from atoll.state.durations import Durations
from atoll.state.gang_states import GangState
from atoll.state.offenses import Running
from atoll.state.queued_nodes import Gang, HostCallKind, QueuedNode
from atoll.state.session import GangRun, Key, Launch
from atoll.state.tenants import Tenant

# Seconds until the end of a worker, or the loss of its connection, has certainly been detected.
LOSS_KNOWN_SECONDS = 0.5
# Seconds until the processes of a Python program have certainly ended on all hosts after one of them has ended.
PROCESSES_ENDED_SECONDS = 15.0


class Failures:
    """Finds the launches of all sessions that cannot end after a failure, and fails them."""

    def __init__(
        self,
        shared: SharedState,
        launches: Launches,
    ) -> None:
        self._gang_ends, self._failing = launches.gang_ends, launches.failing
        self._in_flight = launches.in_flight
        self._control_flow, self._large_launches = launches.control_flow_runs, launches.large_launches
        self._delegated_runs, self._revocations = launches.delegated_runs, launches.revocations
        self._requeued, self._feeds = launches.requeued, launches.feeds
        self._remains, self._memory_waits = shared.remains, launches.reservations.waits
        self._connections = shared.connections
        self._scheduler = launches.scheduler
        self._resources = shared.resources
        self._sessions = shared.sessions
        self._failed_for: Durations[int] = Durations()  # how long gangs have failed, by sequence

    def running(self, island: int) -> dict[str, Running]:
        """Return the functions in flight on the island's devices, without colocated Python, which has own processes."""
        found: dict[str, Running] = {}
        hosts = set(self._resources.hosts_of(island))
        for gang in self._in_flight.values():
            spec = gang.run.spec
            if spec.host_call is not HostCallKind.PYTHON and not hosts.isdisjoint(gang.run.hosts_left):
                for name in spec.functions:
                    found.setdefault(name, Running(gang.node.tenant, spec.duration_estimate.runs > 0))
        return found

    def half_failed(self) -> list[Gang[GangRun]]:
        """Return the collective gangs that one host failed or never began while others run them, perhaps forever.

        The other hosts may be on other islands.
        """
        collectives = [each for each in self._in_flight.values() if each.run.spec.collective]
        nodes = {each.node.number: each.node for each in collectives}
        failed = {
            number for number, node in nodes.items() if any(each.state is GangState.FAILED for each in node.gangs)
        }
        return [gang for gang in collectives if self._waits_on(gang, gang.node.number in failed)]

    def islands_that_wait(self, gang: Gang[GangRun]) -> list[int]:
        """Return the islands of a half-failed gang on which hosts wait for another host."""
        return self._waits_on(gang, True)

    def _waits_on(self, gang: Gang[GangRun], node_failed: bool) -> list[int]:
        """Return the islands on which hosts run a gang that failed on a host with which they communicate."""
        run = gang.run
        if not run.hosts_left:
            return []
        if run.spec.is_apart:  # they communicate only with hosts of the same island
            failed_on = run.spec.islands_of(set(run.left_out))
            return [island for island in run.islands_left if island in failed_on]
        return run.islands_left if run.failure is not None or node_failed else []

    def fail_launches_of_island(self, island: int, status: Status) -> Survivors:
        """Fail the launches that do not survive the failure of the island. Return the survivors, which wait for it."""
        self._control_flow.fail_unreported(island, status)
        hosts = set(self._resources.hosts_of(island))
        survivors = Survivors(island, hosts, self._in_flight, self._sessions, self._delegated_runs.has_begun)
        survivors.judge(self._launches_of(island))
        self._revocations.revoke_unstarted(island, survivors.granted, status)
        self._requeued.requeue(survivors.sent)
        for launch in survivors.waiting:
            self._feeds.await_again(launch, hosts)
        for launch, reason in survivors.lost:
            why = status.reworded(f"{status.message}{survivors.described_run(launch)} ({reason})")
            self._failing.fail(launch, self._cause(launch) or why.within(launch.program.name))
        for gang in [g for g in self._in_flight.values() if g.is_on(island)]:
            self._failing.fail(gang.run.launch, status.within(gang.run.launch.program.name))
            self._gang_ends.parts_lost(gang, hosts, status)
        granted = set(map(id, survivors.granted))
        sent = [*self._in_flight.values(), *self._committed()]
        nodes = {gang.node.number: gang.node for gang in sent}
        on_island = {number for number, node in nodes.items() if any(gang.is_on(island) for gang in node.gangs)}
        for gang in sent:
            if id(gang.run.launch) in granted:
                continue
            # Data may be lost on the way although the sender had ended its part, or the sending failed. A function on
            # several islands fails when its world is closed.
            spec = gang.run.spec
            is_in_world = spec.collective and bool(spec.functions) and not spec.is_apart
            depends_on_it = spec.incoming or gang.run.failure is not None or is_in_world
            if depends_on_it and gang.node.number in on_island:
                why = status.within(gang.run.launch.program.name)
                self._failing.fail(gang.run.launch, why)
                if is_in_world and gang.sequence in self._in_flight:
                    gang.run.failure = gang.run.failure or why  # it may hang, although the lost hosts had ended it
        self._revocations.hosts_failed(hosts)
        return survivors

    def feeds_lost(self, lost: Iterable[tuple[Key, QueuedNode[GangRun]]], status: Status) -> None:
        """Fail the launches that await bytes of a session's client that will not arrive."""
        hosts = {id(node): (node.gangs[0].run.launch, host) for (host, _), node in lost}
        for launch, host in hosts.values():
            text = f"{status.message} (bytes of its client were on their way to host {host}, and are not kept)"
            self._failing.fail(launch, status.reworded(text).within(launch.program.name))

    def _launches_of(self, island: int) -> list[Launch]:
        """Return the launches that wait for the island, were sent there, or began there and will continue there.

        They are in the order of their arrival.
        """
        found = [gang.run.launch for gang in self._in_flight.values() if gang.is_on(island)]
        found += [node.gangs[0].run.launch for node in self._scheduler.nodes(island)]
        found += self._delegated_runs.to_continue_on(island)
        launches = {id(launch): launch for launch in found if launch.error is None}  # few have many nodes
        return sorted(launches.values(), key=_age)

    def _committed(self) -> list[Gang[GangRun]]:
        """Return the gangs that are committed and have not started."""
        nodes = sorted(self._scheduler.committed_nodes(), key=lambda node: node.number)
        return [gang for node in nodes for gang in node.gangs if gang.state is GangState.COMMITTED]

    def fail_without_inputs(self) -> None:
        """Fail the launches in line that have lost an input. Only sessions with errors can have such launches."""
        with_errors = {number for number, session in self._sessions.items() if session.has_errors}
        nodes = self._scheduler.nodes_of(with_errors) if with_errors else []
        for node in sorted(nodes, key=lambda node: node.number):
            session = self._sessions.get(node.session)
            for gang in node.gangs:
                problem = gang_problem(session, gang)
                if problem is not None:
                    self._failing.fail(gang.run.launch, problem)

    def isolate(self, suspects: Container[str]) -> None:
        """Have the gangs in line that run suspected functions run exclusively."""
        for node in self._waiting():
            for gang in node.gangs:
                if not gang.run.spec.host_call and any(name in suspects for name in gang.run.spec.functions):
                    gang.exclusive = True

    def fail_refused(self, refused: Mapping[str, Status]) -> None:
        """Fail the launches in line whose functions are refused."""
        self._fail_calls(self._waiting(), refused)

    def fail_calls(self, session: int, function: str, status: Status) -> None:
        """Fail the launches in line of a session that call this function."""
        nodes = sorted(self._scheduler.nodes_of((session,)), key=lambda node: node.number)
        self._fail_calls(nodes, {function: status})

    def _fail_calls(self, nodes: Iterable[QueuedNode[GangRun]], failed: Mapping[str, Status]) -> None:
        for node in nodes:
            for gang in node.gangs:
                name = next((name for name in gang.run.spec.functions if name in failed), None)
                if name is not None:
                    self._failing.fail(gang.run.launch, failed[name].within(gang.run.launch.program.name))

    def fail_without_functions(
        self, lost: Collection[str], awaited: Mapping[int, Collection[str]], status: Status
    ) -> None:
        """Fail the launches in line that would start before functions that hosts have `lost` are compiled again.

        Functions that sessions wait for (`awaited`) fail, so all launches that need one of them fail as well.
        """
        if not lost:
            return
        for node in self._waiting():
            failing = awaited.get(node.session, ())
            for gang in node.gangs:
                has_place = gang.state is GangState.COMMITTED
                if any(name in failing or (has_place and name in lost) for name in gang.run.spec.functions):
                    self._failing.fail(gang.run.launch, status.within(gang.run.launch.program.name))

    def fail_tenant(self, tenant: Tenant, status: Status) -> None:
        """Fail the launches of a tenant that are in line."""
        for node in self._waiting():
            if node.tenant is tenant:
                self._failing.fail(node.gangs[0].run.launch, status)

    def _waiting(self) -> list[QueuedNode[GangRun]]:
        """Return the nodes with gangs that have not started, in the order of their launches."""
        return sorted(self._scheduler.all_nodes(), key=lambda node: node.number)

    def fail_waiting(self, island: int, status: Status) -> None:
        """Fail the launches in line, and the revoked runs to be put in line, that need an island that was removed."""
        for node in self._scheduler.nodes(island):
            if node.gangs:
                self._failing.fail(node.gangs[0].run.launch, status)
        for launch in self._delegated_runs.to_continue_on(island):
            self._failing.fail(launch, status)
        self._scheduler.remove_island(island)

    def tick(self, now: float) -> None:
        """Once a second: fail launches whose gangs have failed by themselves, or wait for memory in vain."""
        self._settle(now)
        self._fail_hopeless()

    def _settle(self, now: float) -> None:
        """Report a gang's failure as its own if its island is still alive a while later."""
        failed = {
            gang.sequence: gang
            for gang in self._in_flight.values()
            if _has_failed_by_itself(gang) and not self._has_hosts_away(gang)
        }
        for sequence, seconds in self._failed_for.update(now, failed).items():
            gang = failed[sequence]
            if seconds >= self._patience(gang.run) and gang.run.failure is not None:
                self._failing.fail(gang.run.launch, self._cause(gang.run.launch) or gang.run.failure)
                if not gang.run.hosts_left:
                    self._gang_ends.end_gang(gang)

    def _patience(self, run: GangRun) -> float:
        """Return for how many seconds a failed gang may still turn out to have failed because a host is lost.

        If a process of a Python program ends, so do those on the other hosts. The worker that is lost may be the one
        that has not reported this, and the end of its process may be known before its own.
        """
        waits = bool(run.hosts_left) and run.failure is not None and self._gang_ends.ended_with_others(run, run.failure)
        return PROCESSES_ENDED_SECONDS if waits else LOSS_KNOWN_SECONDS

    def _cause(self, launch: Launch) -> Status | None:
        """Return the error of the launch that was to make an argument of this one, if it failed or is failing."""
        arguments = launch.entries[: launch.program.arguments]
        error = next((each.error for each in arguments if each.error is not None), None)
        if error is not None:
            return error
        unready = {id(each) for each in arguments if not each.ready}
        for gang in self._in_flight.values():
            other = gang.run.launch
            if _has_failed_by_itself(gang) and other is not launch:
                made = map(id, other.entries[other.program.arguments :])
                if not unready.isdisjoint(made):
                    return gang.run.failure
        return None

    def _has_hosts_away(self, gang: Gang[GangRun]) -> bool:
        """Return whether a host of the gang's islands has lost its connection.

        It may still connect again, or the engine has yet to report why it is lost.
        """
        islands = {island for other in gang.node.gangs for island in other.all_islands}
        hosts = [host for each in islands for host in self._resources.hosts_of(each)]
        return any(self._connections.is_away(each) for each in hosts) or any(
            each not in self._connections.hosts and not self._resources.has_failed(each) for each in hosts
        )

    def _fail_hopeless(self) -> None:
        """Fail the launches that wait for memory in vain. The errors name the holders of the memory."""
        releasing = bool(self._remains.waiting or self._large_launches.ended)
        for gang, status in self._memory_waits.hopeless(releasing):
            self._failing.fail(gang.run.launch, status)


def _has_failed_by_itself(gang: Gang[GangRun]) -> bool:
    """Return whether the gang has failed, unless it is a collective that may have failed because a host is lost.

    Such a collective has hosts that have not ended it.
    """
    return gang.run.failure is not None and not (gang.run.hosts_left and gang.run.spec.collective)


def _age(launch: Launch) -> int:
    """Return the position of a launch among those of its session."""
    return min(node.age for node in launch.nodes)
