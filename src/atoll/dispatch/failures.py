"""Which launches on their way fail, when hosts fail, gangs fail on some of their hosts, or memory is never free."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from atoll.cluster.resources import ResourceManager
from atoll.dispatch.connections import Connections
from atoll.dispatch.launcher import Launcher
from atoll.dispatch.survivors import Survivors
from atoll.errors import Status
from atoll.scheduling.durations import Durations
from atoll.scheduling.feeds import Key
from atoll.scheduling.gang_states import GangState
from atoll.scheduling.launch_checks import gang_problem
from atoll.scheduling.offenses import Running
from atoll.scheduling.queued_nodes import Gang, HostCallKind, QueuedNode
from atoll.scheduling.session import GangRun, Launch, Session
from atoll.scheduling.tenants import Tenant

# Seconds after which the end of a worker is surely known, or that its connection is away.
LOSS_KNOWN_SECONDS = 0.5


class Failures:
    """Finds what a loss has broken among the launches of all sessions, and fails it."""

    def __init__(
        self,
        launcher: Launcher,
        resources: ResourceManager,
        sessions: dict[int, Session],
        connections: Connections,
    ) -> None:
        self._launcher = launcher
        self._connections = connections
        self._scheduler = launcher.scheduler
        self._resources = resources
        self._sessions = sessions
        self._failed_for: Durations[int] = Durations()  # gangs, by sequence

    def running(self, island: int) -> dict[str, Running]:
        """The functions in flight on the island's devices: colocated Python runs in processes of its own."""
        found: dict[str, Running] = {}
        for gang in self._launcher.in_flight.values():
            spec = gang.run.spec
            if gang.island == island and spec.host_call is not HostCallKind.PYTHON:
                for name in spec.functions:
                    found.setdefault(name, Running(gang.node.tenant, spec.duration_estimate.runs > 0))
        return found

    def half_failed(self) -> list[Gang[GangRun]]:
        """What failed on one host while others of its island still compute it: they may wait for it in vain."""
        return [
            gang
            for gang in self._launcher.in_flight.values()
            if gang.run.failure is not None and gang.run.hosts_left and gang.run.spec.collective
        ]

    def island_failed(self, island: int, status: Status) -> Survivors:
        """Fail the launches that have lost something with the island. The others wait for it: see `survivors`."""
        self._scheduler.pause(island)
        self._launcher.control_flow.island_failed(island, status)
        hosts = set(self._resources.hosts_of(island))
        survivors = Survivors(
            island, hosts, self._launcher.in_flight, self._sessions, self._launcher.delegated_runs.has_begun
        )
        survivors.judge(self._launches_of(island))
        self._launcher.delegated_runs.island_failed(island, survivors.granted, status)
        self._launcher.run_again(survivors.sent)
        for launch in survivors.waiting:
            self._launcher.await_again(launch, hosts)
        for launch, reason in survivors.lost:
            # An argument of it may be what another launch was to make: the loss of that one is the cause.
            failed = (each.error for each in launch.entries[: launch.program.arguments] if each.error is not None)
            why = Status(status.code, f"{status.message} ({reason})", status.payloads)
            self._launcher.fail(launch, next(failed, None) or why.within(launch.program.name))
        for gang in [g for g in self._launcher.in_flight.values() if g.island == island]:
            self._launcher.fail(gang.run.launch, status.within(gang.run.launch.program.name))
            self._launcher.finish(gang)
        granted = set(map(id, survivors.granted))
        for gang in [*self._launcher.in_flight.values(), *self._committed()]:
            if id(gang.run.launch) in granted:
                continue
            # What was sent may be lost on its way, though the sender had done its part; or it could not be sent.
            depends_on_it = gang.run.spec.incoming or gang.run.failure is not None
            if depends_on_it and any(other.island == island for other in gang.node.gangs):
                self._launcher.fail(gang.run.launch, status.within(gang.run.launch.program.name))
        self._launcher.delegated_runs.hosts_failed(hosts)
        return survivors

    def feeds_lost(self, session: Session, lost: Iterable[tuple[Key, QueuedNode[GangRun]]], status: Status) -> None:
        """Fail the launches that await bytes of a session's client which will not come."""
        hosts = {id(node): (node.gangs[0].run.launch, host) for (host, _), node in lost}
        for launch, host in hosts.values():
            text = f"{status.message} (bytes of its client were on their way to host {host}, and are not kept)"
            self._launcher.fail(launch, Status(status.code, text, status.payloads).within(launch.program.name))

    def _launches_of(self, island: int) -> list[Launch]:
        """Return the launches that wait for the island or were sent there, in the order in which they came."""
        nodes = {each.number: each for each in self._scheduler.nodes(island)}
        found = {
            gang.node.number: gang.run.launch for gang in self._launcher.in_flight.values() if gang.island == island
        }
        found.update((number, each.gangs[0].run.launch) for number, each in nodes.items())
        launches = {id(launch): launch for _, launch in sorted(found.items(), key=lambda each: _age(each[1]))}
        return [launch for launch in launches.values() if launch.error is None]

    def _committed(self) -> list[Gang[GangRun]]:
        """Gangs that have their places in the order, and have not started."""
        nodes = (node for island in self._resources.islands for node in self._scheduler.nodes(island))
        return [gang for node in nodes for gang in node.gangs if gang.state is GangState.COMMITTED]

    def fail_doomed(self) -> None:
        """Launches in line fail now where an input of theirs is lost."""
        for node in self._waiting():
            session = self._sessions.get(node.session)
            for gang in node.gangs:
                problem = gang_problem(session, gang)
                if problem is not None:
                    self._launcher.fail(gang.run.launch, problem)

    def isolate(self, suspects: Container[str]) -> None:
        """Have the gangs in line that run suspected functions run exclusively."""
        for node in self._waiting():
            for gang in node.gangs:
                if not gang.run.spec.host_call and any(name in suspects for name in gang.run.spec.functions):
                    gang.exclusive = True

    def fail_refused(self, refused: Mapping[str, Status]) -> None:
        """Fail the launches in line whose functions are refused."""
        for node in self._waiting():
            for gang in node.gangs:
                name = next((name for name in gang.run.spec.functions if name in refused), None)
                if name is not None:
                    self._launcher.fail(gang.run.launch, refused[name].within(gang.run.launch.program.name))

    def fail_tenant(self, tenant: Tenant, status: Status) -> None:
        """Fail the launches of a tenant that are in line."""
        for node in self._waiting():
            if node.tenant is tenant:
                self._launcher.fail(node.gangs[0].run.launch, status)

    def _waiting(self) -> list[QueuedNode[GangRun]]:
        """Return the nodes of which some gang has not started, in the order of their launches."""
        nodes = {each.number: each for island in self._resources.islands for each in self._scheduler.nodes(island)}
        return [node for _, node in sorted(nodes.items())]

    def fail_waiting(self, island: int, status: Status) -> None:
        """Launches in line that need the island fail."""
        for node in self._scheduler.nodes(island):
            if node.gangs:
                self._launcher.fail(node.gangs[0].run.launch, status)
        self._scheduler.remove_island(island)

    def tick(self, now: float) -> None:
        """Once a second: finds what has failed by itself, or waited in vain."""
        self._settle(now)
        self._fail_hopeless()

    def _settle(self, now: float) -> None:
        """Gangs that failed on hosts of an island that is still there a while later have failed by themselves."""
        failed = {
            gang.sequence: gang
            for gang in self._launcher.in_flight.values()
            if gang.run.failure is not None
            and not (gang.run.hosts_left and gang.run.spec.collective)
            and not self._has_hosts_away(gang)
        }
        for sequence, seconds in self._failed_for.update(now, failed).items():
            gang = failed[sequence]
            if seconds >= LOSS_KNOWN_SECONDS and gang.run.failure is not None:
                self._launcher.fail(gang.run.launch, gang.run.failure)
                if not gang.run.hosts_left:
                    self._launcher.finish(gang)

    def _has_hosts_away(self, gang: Gang[GangRun]) -> bool:
        """Whether a host of its launch's islands may be lost: it comes back, or its loss is said in the end."""
        islands = {other.island for other in gang.node.gangs}
        return any(self._connections.is_away(host) for each in islands for host in self._resources.hosts_of(each))

    def _fail_hopeless(self) -> None:
        """What has waited for memory in vain fails; the error names who holds it."""
        if self._launcher.remains.waiting:  # some of which is memory
            return
        for gang, status in self._launcher.memory.waits.hopeless():
            self._launcher.fail(gang.run.launch, status)


def _age(launch: Launch) -> int:
    """Return the place of a launch among those of its session."""
    return min(node.age for node in launch.nodes)
