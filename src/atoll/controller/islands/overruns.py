"""Ends runs that take too long: runs of closed sessions, and runs of tenants that make other tenants wait.

A run is stopped on its devices if they support that: CPU devices can stop in a loop (`devices.xla.stops`). If it still
has not ended a while later, its island restarts, which loses what other sessions have stored there.

A run's time counts while all of its hosts report that it keeps their devices busy. A gang may be in flight for longer
if it is behind another gang, or waits for bytes or for a client.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from atoll.controller.islands.island_recovery import IslandRecovery
from atoll.controller.state import ClusterState
from atoll.errors import Code, Status
from atoll.launch.foremost_gangs import foremost_gangs
from atoll.launch.launches import Launches
from atoll.launch.worlds import Worlds
from atoll.protocol import messages as m
from atoll.state.durations import Durations
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.session import GangRun, Session

# For the runs of a closed session, whose results nobody can read, to end normally. All of them share this time. If each
# run in line had its own, a few endless loops would keep other sessions from the devices for several times as long.
STOP_SECONDS = 5.0


class _Closed(msgspec.Struct, frozen=True):
    """A closed session with gangs in flight."""

    name: str
    since: float


class Overruns:
    """Ends runs that take too long."""

    def __init__(
        self,
        state: ClusterState,
        launches: Launches,
        recovery: IslandRecovery,
        worlds: Worlds,
    ) -> None:
        self._abandoned_seconds = state.settings.abandoned_seconds
        self._sessions = state.sessions
        self._tenants = state.tenants
        self._history = state.history
        self._outbox = state.outbox
        self._in_flight, self._scheduler = launches.in_flight, launches.scheduler
        self._recovery = recovery
        self._worlds = worlds
        self._busy: dict[int, m.Pong] = {}  # by host: the last replies of hosts whose devices are busy
        self._running: dict[int, float] = {}  # by sequence: since when gangs keep the devices of all their hosts busy
        self._abandoned: Durations[int] = Durations()
        self._stopped: dict[int, tuple[float, str]] = {}  # by sequence: since when, and why
        self._closed: dict[int, _Closed] = {}  # by session

    def session_closed(self, session: Session) -> None:
        """Watch the session's gangs in flight, which continue; a gang that does not end is stopped."""
        if any(gang.node.session == session.number for gang in self._in_flight.values()):
            self._closed[session.number] = _Closed(session.name, self._outbox.seconds)

    def host_answered(self, host: int, message: m.Pong | m.RelayedPong) -> None:
        """Record which gangs keep the devices of `host` busy."""
        if message.running:
            self._busy[host] = m.Pong(message.seconds, message.clock, message.running)
        elif host in self._busy:
            del self._busy[host]

    def islands(self) -> set[int]:
        """Return the islands with stopped runs that have not ended. They restart if these do not end."""
        now = self._outbox.seconds
        stopped = {number for number, closed in self._closed.items() if now - closed.since > STOP_SECONDS}
        gangs = (
            gang for gang in self._in_flight.values() if gang.sequence in self._stopped or gang.node.session in stopped
        )
        return {island for gang in gangs for island in gang.all_islands}

    def tick(self, now: float) -> None:
        """Stop runs that take too long, and restart islands that cannot stop one. Called once per second."""
        in_flight = self._in_flight
        if not in_flight:
            self._closed.clear()
            self._stopped.clear()
            self._running.clear()
            return
        foremost = {gang.sequence for gang in foremost_gangs(in_flight.values())}
        of_closed = {gang.node.session for gang in in_flight.values()} & self._closed.keys()
        self._closed = {number: self._closed[number] for number in of_closed}
        self._stopped = {sequence: each for sequence, each in self._stopped.items() if sequence in in_flight}
        running = self._keeping_busy()
        abandoned = [each for each in sorted({*foremost, *running}) if in_flight[each].node.session in of_closed]
        self._running = {each: self._running.get(each, since) for each, since in running.items()}
        for sequence, since in self._running.items():
            gang = in_flight.get(sequence)
            if gang is not None and gang.node.session not in of_closed:
                self._look_at(gang, now - since, now)
        over = {number for number, closed in self._closed.items() if now - closed.since > STOP_SECONDS}
        stopping = [gang for gang in in_flight.values() if gang.node.session in over]
        nodes = [gang.node for gang in stopping]
        for gang in stopping:  # those that have not begun end when they do
            self._stop(gang, "its session has ended", nodes)
        for sequence, seconds in self._abandoned.update(now, abandoned).items():
            gang = in_flight.get(sequence)  # None if its island has restarted just now, because of another gang
            if gang is not None and seconds > self._abandoned_seconds:
                self._end_abandoned(gang)

    def _keeping_busy(self) -> dict[int, float]:
        """Return the gangs that keep all hosts busy that they run on, and since when this is known."""
        hosts: dict[int, set[int]] = {}
        since: dict[int, float] = {}
        for host, answer in self._busy.items():
            for sequence in answer.running:
                hosts.setdefault(sequence, set()).add(host)
                since[sequence] = max(since.get(sequence, answer.seconds), answer.seconds)
        in_flight = self._in_flight
        return {
            sequence: since[sequence]
            for sequence in sorted(hosts)
            if sequence in in_flight and in_flight[sequence].run.hosts_left <= hosts[sequence]
        }

    def _look_at(self, gang: Gang[GangRun], seconds: float, now: float) -> None:
        limit = gang.node.tenant.settings.run_seconds
        if gang.sequence not in self._stopped:
            if not limit or seconds <= limit or not self._others_wait(gang):
                return
            why = f"it ran for {seconds:.0f} s while others waited, and its tenant's limit is {limit} s (run_seconds)"
            self._history.record(
                "stopped", f"{_named(gang)}: {why}", gang.island, gang.node.session, gang.node.tenant.name
            )
            self._recovery.charge_overrun(gang)
            self._stopped[gang.sequence] = now, why
        since, why = self._stopped[gang.sequence]
        if now - since > self._abandoned_seconds:
            reason = f"a gang on {_hosts(gang)} could not be stopped within {self._abandoned_seconds:.0f} s"
            self._recovery.restart_for(gang, reason, f"{_named(gang)} could not be stopped: {why}")
        else:
            self._stop(gang, why)

    def _end_abandoned(self, gang: Gang[GangRun]) -> None:
        """Restart the island of a closed session's gang that runs, or has nothing before it, for too long."""
        limit = f"for more than {self._abandoned_seconds:.0f} s after its session ended"
        name = f"{gang.run.launch.program.name} of {self._closed[gang.node.session].name}"
        runs = f"{'has run' if gang.sequence in self._running else 'has not ended'} on {_hosts(gang)} {limit}"
        self._recovery.restart_for(gang, f"a gang {runs}", f"{name} {runs}")

    def _stop(self, gang: Gang[GangRun], why: str, others: Iterable[QueuedNode[GangRun]] = ()) -> None:
        """Stop a gang, and the gangs of the same computation on other islands, which may run independently.

        The `others` are stopped as well, so their worlds are closed once.

        Hosts stop at different points of the computation. Its world is closed before, so that no collective of a later
        run on one host can meet a collective of this run on another one. That also ends collectives that wait for a
        host that has stopped. Runs of other functions in this world end as well.
        """
        text = f"the run of {gang.run.launch.program.name} was stopped: {why}"
        running = [each for each in gang.node.gangs if each.sequence in self._in_flight]
        status = Status(int(Code.CANCELLED), text)
        if self._worlds.replace(gang.node, status, others):
            for each in running:
                each.run.failure = each.run.failure or status
        for each in running:
            for host in each.run.hosts_left:
                self._outbox.to_host(host, m.StopRun(each.sequence, text))

    def _others_wait(self, gang: Gang[GangRun]) -> bool:
        """Whether another tenant has work behind the gang, or waits for its island."""
        if not self._tenants.are_told_apart:
            return False
        own, hosts = gang.node.tenant, gang.run.hosts_left
        in_flight = self._in_flight.values()
        if any(each.node.tenant is not own and not hosts.isdisjoint(each.run.hosts_left) for each in in_flight):
            return True
        waits = self._scheduler.waits()
        sessions = (self._sessions.get(wait.session) for island in gang.all_islands for wait in waits.get(island, ()))
        return any(each is not None and each.tenant is not own for each in sessions)


def _hosts(gang: Gang[GangRun]) -> str:
    return f"hosts {sorted(gang.run.hosts_left)} of {gang.run.islands_text}"


def _named(gang: Gang[GangRun]) -> str:
    return f"the run of {gang.run.launch.program.name} on {_hosts(gang)}"
