"""Islands that are lost and come back: what fails, what waits, and what is done again.

An island fails as a whole: the broken collectives of the hosts that are left cannot be mended.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import NamedTuple

from atoll.cluster.lifecycle import IslandFailed, IslandRemoved, IslandRestarted, IslandState
from atoll.controller.sessions.queries import Queries
from atoll.controller.state import ClusterState
from atoll.dispatch.compilation import Compilation
from atoll.dispatch.failures import Failures
from atoll.dispatch.launcher import Launcher
from atoll.errors import OK, Code, Status
from atoll.protocol import messages as m
from atoll.scheduling.durations import Durations
from atoll.scheduling.offenses import Running
from atoll.scheduling.quarantine import is_crash, is_own_crash
from atoll.scheduling.queued_nodes import Gang
from atoll.scheduling.session import GangRun, Session

# For the other hosts of a gang to end, once it has failed on one of them.
HALF_FAILED_SECONDS = 5.0
# A host that is heard answers once a second: one that has not for so long may itself be what is silent.
_HEARD_SECONDS = 2.5
# For the loss of a host to be known, where another has lost its link to it: the engine knows better why.
LINK_SECONDS = 2.0

# Pairs of machines that did not hear each other and are remembered: a spare replaces one of them the second time.
_MOST_DIVIDED = 64

_LOST = "what was stored or ran on its island is lost"


class _AtLoss(NamedTuple):
    """The functions in flight on an island when it was lost, and the bytes of device memory by name of the tenant."""

    running: Mapping[str, Running]
    memory: Mapping[str, int]


class Recovery:
    """Decides that an island has failed, and restarts it. `pending_reason(island)` is why its start waits."""

    def __init__(
        self,
        state: ClusterState,
        launcher: Launcher,
        failures: Failures,
        compilation: Compilation,
        queries: Queries,
        pending_reason: Callable[[int], str],
        departure_of: Callable[[int], str],
        broken: Mapping[int, str],
    ) -> None:
        self._resources = state.resources
        self._lifecycle = state.lifecycle
        self._sessions = state.sessions
        self._outbox = state.outbox
        self._quarantine = state.quarantine
        self._offenses = state.offenses
        self._leases = state.leases
        self._tenants = state.tenants
        self._history = state.history
        self._start_seconds = state.settings.start_seconds
        self._launcher = launcher
        self._failures = failures
        self._compilation = compilation
        self._queries = queries
        self._pending_reason = pending_reason
        self._departure_of = departure_of
        self._hosts = state.connections.hosts
        self._divided: dict[tuple[str, str], float] = {}  # when two machines did not hear each other, by name
        self._broken = broken  # links between hosts, by island
        self._broken_for: Durations[int] = Durations()  # islands
        self._hanging: Durations[int] = Durations()  # gangs, by sequence
        self._restarting: Durations[int] = Durations()  # islands
        self._silent_pairs: dict[tuple[int, int], float] = {}  # hosts that have not heard one another, for how long
        self._at_loss: dict[int, _AtLoss] = {}  # by island, until the engine says how its worker ended

    # ---- hosts

    def worker_lost(self, host: int, reason: str) -> None:
        """The connection to a host's worker is lost."""
        host, departure = self._first_cause(host)
        record = self._resources.hosts[host]
        text = f"host {host} of island {record.island} is gone ({departure or f'{record.worker}: {reason}'})"
        if self._resources.islands[record.island].works:
            self._at_loss[record.island] = _AtLoss(self._failures.running(record.island), self._memory(record.island))
        self._lose(record.island, Status(Code.DATA_LOSS, f"{text}; {_LOST}"))

    def _memory(self, island: int) -> dict[str, int]:
        """Return the bytes that each tenant has on the island's devices."""
        hosts, found = set(self._resources.hosts_of(island)), {}
        for tenant in self._tenants.by_name.values():
            used = {} if tenant.memory is None else tenant.memory.used
            found[tenant.name] = sum(nbytes for (host, _), nbytes in used.items() if host in hosts)
        return found

    def _first_cause(self, host: int) -> tuple[int, str]:
        """Return the host of the island that failed first, and why if its machine has left: XLA ends the others."""
        island = self._resources.hosts[host].island
        for each in (host, *self._resources.hosts_of(island)):
            departure = self._departure_of(each) if each == host or each not in self._hosts else ""
            if departure and each in self._resources.hosts:
                return each, departure
        return host, ""

    def worker_ended(self, message: m.WorkerEnded) -> None:
        """The engine has seen a worker's end, which what ran there may have caused."""
        record = self._resources.hosts.get(message.host)
        if record is None or record.incarnation != message.incarnation:
            return
        compiling = self._compilation.under_way(message.host)
        self.worker_lost(message.host, message.text)
        at_loss = self._at_loss.pop(record.island, None)
        # Of what had joined only: else nothing ran or was compiled there yet. A lost machine is no program's fault.
        if at_loss is None or message.status is None:
            return
        running = at_loss.running
        if message.status == -signal.SIGKILL:
            self._killed(record.island, at_loss)
        elif is_crash(message.status):
            has_others = len(self._resources.hosts_of(record.island)) > 1
            self._quarantine.crashed(message.status, message.text, set(running), compiling, has_others)
            self._compilation.refuse(self._quarantine.refused)
            self._failures.fail_refused(self._quarantine.refused)
            self._failures.isolate(self._quarantine.suspects)
            self._charge(record.island, running, is_own_crash(message.status, has_others))

    def _killed(self, island: int, at_loss: _AtLoss) -> None:
        """Charge the loss of a worker that somebody killed: the system does that when memory is short.

        Of the tenants whose programs ran, it counts for the one that had the most memory. If no program ran, but
        tenants had arrays there, it counts for nobody.
        """
        memory = at_loss.memory
        tenant = max(
            (each.tenant for each in at_loss.running.values()), key=lambda each: memory[each.name], default=None
        )
        if tenant is not None:
            own = {name: each for name, each in at_loss.running.items() if each.tenant is tenant}
            self._charge(island, own, is_sure=True)
        elif self._tenants.are_told_apart and any(memory.values()):
            self._outbox.to_engine(m.RestartExcused(island))

    def _charge(self, island: int, running: Mapping[str, Running], is_sure: bool) -> None:
        """Charge the failure of an island to the tenants of what ran there, not to the island."""
        if not running or not self._tenants.are_told_apart:
            return
        self._outbox.to_engine(m.RestartExcused(island))
        self._blame(island, running, is_sure)

    def charge_overrun(self, gang: Gang[GangRun]) -> None:
        """Count a run that had to be stopped as an offense of its tenant."""
        self._blame(gang.island, {gang.run.launch.program.name: Running(gang.node.tenant, False)}, is_sure=True)

    def _blame(self, island: int, running: Mapping[str, Running], is_sure: bool) -> None:
        for tenant in self._offenses.crashed(self._outbox.seconds, running.values(), is_sure=is_sure):
            problem = self._offenses.launch_problem(tenant, self._outbox.seconds)
            if problem is not None:
                self._history.record("suspended", problem.message, island, tenant=tenant.name)
                self._failures.fail_tenant(tenant, problem)

    def worker_fails(self, host: int, message: m.WorkerFails) -> None:
        """A bug ends the worker of `host`, which has reported it."""
        self.worker_lost(host, f"the worker of host {host} failed: {message.text}")

    def controller_failed(self, host: int, reason: str, is_charged: bool) -> None:
        """Restart the island of a host, since the controller failed at its message and does not know what runs there.

        With `is_charged`, the restart does not count against the island.
        """
        island = self._resources.hosts[host].island
        text = f"the controller failed at a message of host {host} ({reason})"
        self._restart(island, text, code=Code.DATA_LOSS)
        if is_charged:
            self._outbox.to_engine(m.RestartExcused(island))

    def never_ready(self, host: int, reason: str) -> None:
        """A worker has connected and says no more: where its island waits for it, all of that is started anew."""
        island = self._resources.islands.get(self._resources.topology.island_of(host))
        if island is not None and not island.works and not island.is_over:
            self._outbox.to_engine(m.RestartIsland(island.number, reason))
            self._lose(island.number, Status(Code.DEADLINE_EXCEEDED, reason))

    def engine_came(self) -> None:
        """One that begins anew has heard nothing of what was asked of the earlier one."""
        for island in self._resources.islands.values():
            if island.state is IslandState.RESTARTING and island.last_failure is not None:
                self._outbox.to_engine(m.RestartIsland(island.number, island.last_failure.message))

    def island_starts(self, message: m.IslandStarts) -> None:
        """Where workers of an earlier incarnation are thought to be there, they have ended: a controller that has been
        superseded had asked the engine for it.
        """
        resources, island = self._resources, message.island
        hosts = [resources.hosts[host] for host in resources.hosts_of(island) if host in resources.hosts]
        if resources.islands[island].works and any(host.incarnation < message.incarnation for host in hosts):
            text = f"the workers of island {island} were ended by order of an earlier controller; {_LOST}"
            self._lose(island, Status(Code.DATA_LOSS, text))

    def peer_silent(self, host: int, message: m.PeerSilent) -> None:
        """A host has not heard another for longer than the lease. What that means is decided at the next tick."""
        self._silent_pairs[min(host, message.host), max(host, message.host)] = message.seconds

    def tick(self, now: float) -> None:
        """Once a second: looks for hosts that are silent, and for gangs and islands that hang."""
        for host in self._leases.expired(now):
            record = self._resources.hosts[host]
            self._restart(
                record.island,
                f"host {host} of island {record.island} has not answered for {self._leases.seconds:.0f} s "
                f"({record.worker} is stopped, or its machine cannot be reached)",
            )
        self._restart_divided(now)
        for island, seconds in self._broken_for.update(now, list(self._broken)).items():
            if seconds > LINK_SECONDS:
                self._restart(island, self._broken[island])
        self._restart_half_failed(now)
        islands = self._resources.islands.values()
        restarting = [each.number for each in islands if each.state is IslandState.RESTARTING]
        for island, seconds in self._restarting.update(now, restarting).items():
            if seconds > self._start_seconds:
                wait = self._pending_reason(island)
                self.remove(island, f"it was not up again within {self._start_seconds:.0f} s{wait and f': {wait}'}")
                self._outbox.to_engine(m.EndIsland(island))

    def _restart_divided(self, now: float) -> None:
        """Restarts islands with two hosts that are heard here, and that do not hear each other."""
        pairs, self._silent_pairs = self._silent_pairs, {}
        for pair, seconds in pairs.items():
            one, other = (self._resources.hosts.get(host) for host in pair)
            leases = self._leases
            heard = all(leases.has(host) and leases.silence(host, now) < _HEARD_SECONDS for host in pair)
            if one is not None and other is not None and one.island == other.island and heard:
                machines = min(one.machine, other.machine), max(one.machine, other.machine)
                is_again = all(machines) and machines in self._divided
                self._divided = dict(list(self._divided.items())[-_MOST_DIVIDED:]) | {machines: now}
                self._restart(
                    one.island,
                    f"hosts {one.number} and {other.number} of island {one.island} have not heard each other for "
                    f"{seconds:.0f} s ({one.worker}, {other.worker}), though the controller hears both",
                    avoid=other.number if is_again else -1,
                )

    def _restart_half_failed(self, now: float) -> None:
        hanging = {gang.sequence: gang for gang in self._failures.half_failed()}
        for sequence, seconds in self._hanging.update(now, hanging).items():
            gang = hanging[sequence]
            if seconds > HALF_FAILED_SECONDS:
                error = gang.run.failure or OK
                waits = f"hosts {sorted(gang.run.hosts_left)} of island {gang.island} wait for another, where"
                named = f"{waits} {gang.run.launch.program.name} failed: {error.message}"
                self.restart_for(gang, f"{waits} a gang failed", named)

    # ---- islands

    def _restart(
        self, island: int, reason: str, logged: str = "", code: Code = Code.DEADLINE_EXCEEDED, avoid: int = -1
    ) -> None:
        if self._resources.islands[island].works:
            self._outbox.to_engine(m.RestartIsland(island, logged or reason, avoid))
            self._lose(island, Status(code, f"{reason}; its island is restarted, and {_LOST}"))

    def restart_for(self, gang: Gang[GangRun], reason: str, named: str) -> None:
        """Restart a gang's island. `named` is for operators and its tenant; other tenants read the `reason`."""
        if not self._tenants.are_told_apart:
            self._restart(gang.island, named)
        elif self._resources.islands[gang.island].works:
            running = {name: Running(gang.node.tenant, False) for name in gang.run.spec.functions}
            self._history.record("hangs", named, gang.island, gang.node.session, gang.node.tenant.name)
            self._restart(gang.island, reason, named)
            self._charge(gang.island, running, is_sure=True)

    def _lose(self, island: int, status: Status) -> None:
        """Handle the failure of a host, and with it of its island, unless that is known already."""
        record = self._resources.islands[island]
        if record.state is IslandState.RESTARTING:
            # Hosts that were back already are lost once more: the island is ready when all of them have joined again.
            self.forget_hosts(island)
        elif not record.is_over:
            self._lifecycle.fail(island, status)

    def forget_hosts(self, island: int) -> set[int]:
        """The island's workers are lost, all of them: without one the others cannot go on. Returns their hosts."""
        self._resources.lose_hosts(island)
        hosts = set(self._resources.hosts_of(island))
        for host in hosts:
            self._outbox.forget_host(host)
            self._leases.forget(host)
        return hosts

    def remove(self, island: int, reason: str) -> None:
        """The island will not be back: what waits for it fails."""
        record = self._resources.islands[island]
        if record.is_over:
            return
        # pathwaysutils' elastic training takes this code, not UNAVAILABLE, for the loss of a slice.
        status = Status(Code.DATA_LOSS, f"island {island} is removed: {reason}")
        if record.works:
            self._lose(island, status)
        self._lifecycle.remove(island, status)

    def failure_acknowledged(self, session: Session, message: m.FailureAcknowledged) -> None:
        """A proxy knows of a loss, and says which bytes of its client will come again."""
        topology = self._resources.topology  # some may have yet to join, in the cluster after the one that was lost
        for island in {topology.island_of(host) for host in message.hosts if host < topology.host_count}:
            losses = session.unacknowledged_failures.get(island)
            if losses is None:
                continue
            status = losses.pop(0)
            if not losses:
                del session.unacknowledged_failures[island]
            hosts = set(self._resources.hosts_of(island))
            lost = session.feeds.lost(hosts, message.resent, message.unsent)
            if lost:
                self._failures.feeds_lost(session, lost, status)
                self._failures.fail_doomed()

    # ---- subscriptions

    def island_failed(self, lost: IslandFailed) -> None:
        """What was there or would have run there fails. What needs the island from now on waits until it is back."""
        island, status = lost.island, lost.status
        hosts = self.forget_hosts(island)
        for session in self._sessions.values():
            session.feeds.lose(hosts)
        survivors = self._failures.island_failed(island, status)
        for session in self._sessions.values():
            session.unacknowledged_failures.setdefault(island, []).append(status)
            self._outbox.to_session(session.number, m.HostsFailed(tuple(sorted(hosts))))
            for handle, entry in list(session.directory.entries.items()):
                if hosts.intersection(entry.hosts) and not survivors.will_make(entry):
                    session.has_errors = True
                    self._launcher.memory.release(entry)
                    if not entry.ready:
                        self._launcher.buffers.settle(session, handle, status.within(entry.producer))
                    elif entry.error is None:
                        entry.error = status.within(entry.producer)
        impatient = {session.number for session in self._sessions.values() if not session.waits_for_islands}
        self._compilation.give_up(hosts, status, impatient)
        self._queries.give_up(hosts, status, impatient)
        self._failures.fail_doomed()

    def island_restarted(self, back: IslandRestarted) -> None:
        """All sessions may go on."""
        island = back.island
        self._at_loss.pop(island, None)
        for session in self._sessions.values():
            self._outbox.to_session(session.number, m.HostsRestarted(self._resources.addresses_of(island)))
            self._compilation.invalidate_island(session, island)
        self._launcher.island_restarted(island)
        self._queries.ask_again(set(self._resources.hosts_of(island)))

    def island_removed(self, removed: IslandRemoved) -> None:
        """What waits for the island fails."""
        self._failures.fail_waiting(removed.island, removed.status)
        hosts = set(self._resources.hosts_of(removed.island))
        self._compilation.give_up(hosts, removed.status)
        self._queries.give_up(hosts, removed.status)
