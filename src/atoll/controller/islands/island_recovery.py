"""Recovery of islands: detect failures, and restart or remove islands. `island_losses` fails what was there.

An island fails as a whole, because the collectives of the remaining hosts cannot be repaired.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from atoll.cluster.lifecycle import IslandFailed, IslandRestarted, IslandState
from atoll.controller.state import ClusterState
from atoll.errors import OK, Code, Details, Status, failure
from atoll.launch.compilation import Compilation
from atoll.launch.failures import Failures
from atoll.launch.launches import Launches
from atoll.launch.worlds import Worlds
from atoll.protocol import messages as m
from atoll.state.closed_worlds import is_of_closed_world
from atoll.state.durations import Durations
from atoll.state.offenses import Running
from atoll.state.quarantine import is_crash, is_own_crash
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun

# For the other hosts of a gang to end, after it has failed on one of them.
HALF_FAILED_SECONDS = 5.0
# The same, if its session has ended or its world was closed: nothing else explains the failure.
ENDED_SECONDS = 1.0
# Hosts reply once per second. A host that has been silent for longer may itself be the cause of a silent pair.
_PRESENT_SECONDS = 2.5
# For the loss of a host to become known after another host has lost its link to it: the engine knows the cause better.
LINK_SECONDS = 2.0

# Remembered pairs of machines that lost each other: a spare replaces one of them the second time.
_MAX_DIVIDED = 64

_LOST = "what was stored or ran on its island is lost"


class _AtLoss(NamedTuple):
    """The functions in flight on an island when it was lost, and each tenant's bytes of device memory, by name."""

    running: Mapping[str, Running]
    memory: Mapping[str, int]


class IslandRecovery:
    """Decides that an island has failed, and that the engine has to restart one whose workers still run.

    After the end of a worker, the engine restarts the island by itself (`engines.island_processes`).

    `pending_reason(island)` returns why the start of an island is delayed, and `departure_of(host)` why a host leaves.
    `broken` has the broken links between hosts, by island.
    """

    def __init__(
        self,
        state: ClusterState,
        *,
        launches: Launches,
        failures: Failures,
        compilation: Compilation,
        pending_reason: Callable[[int], str],
        departure_of: Callable[[int], str],
        broken: Mapping[int, str],
        worlds: Worlds,
    ) -> None:
        self._worlds = worlds
        self._sessions = state.sessions
        self._resources = state.resources
        self._lifecycle = state.lifecycle
        self._outbox = state.outbox
        self._quarantine = state.quarantine
        self._offenses = state.offenses
        self._leases = state.leases
        self._tenants = state.tenants
        self._history = state.history
        self._start_seconds = state.settings.start_seconds
        self._in_flight = launches.in_flight
        self._failures = failures
        self._compilation = compilation
        self._recompilations = compilation.recompilations
        self._pending_reason = pending_reason
        self._departure_of = departure_of
        self._hosts = state.connections.hosts
        self._divided: dict[tuple[str, str], float] = {}  # by names of two machines: when they lost each other
        self._broken = broken
        self._broken_for: Durations[int] = Durations()  # islands
        self._hanging: Durations[int] = Durations()  # gangs, by sequence
        self._restarting: Durations[int] = Durations()  # islands
        self._silent_pairs: dict[tuple[int, int], float] = {}  # hosts that lost each other, and for how many seconds
        self._charged: set[int] = set()  # nodes in flight that their tenants are charged for
        self._at_loss: dict[int, _AtLoss] = {}  # by island, until the engine reports how its worker ended

    # ---- hosts

    def fail_worker(self, host: int, reason: str) -> None:
        """Handle the loss of the connection to a host's worker."""
        host, departure = self._first_cause(host)
        record = self._resources.hosts[host]
        text = f"host {host} of island {record.island} is gone ({departure or f'{record.worker}: {reason}'})"
        if self._resources.islands[record.island].works:
            self._at_loss[record.island] = _AtLoss(self._failures.running(record.island), self._memory(record.island))
        self._fail_island(record.island, failure(Code.DATA_LOSS, f"{text}; {_LOST}", Details(hosts=(host,))))

    def _memory(self, island: int) -> dict[str, int]:
        """Return the bytes that each tenant has on the island's devices."""
        hosts, found = set(self._resources.hosts_of(island)), {}
        for tenant in self._tenants.by_name.values():
            used = {} if tenant.memory is None else tenant.memory.used
            found[tenant.name] = sum(nbytes for (host, _), nbytes in used.items() if host in hosts)
        return found

    def _first_cause(self, host: int) -> tuple[int, str]:
        """Return the host that caused the loss, and why its machine left, if it did: XLA then ends the other hosts."""
        island = self._resources.hosts[host].island
        for each in (host, *self._resources.hosts_of(island)):
            departure = self._departure_of(each) if each == host or each not in self._hosts else ""
            if departure and each in self._resources.hosts:
                return each, departure
        return host, ""

    def worker_ended(self, message: m.WorkerEnded) -> None:
        """Handle the engine's report of a worker's end. A program that ran there may have caused it."""
        record = self._resources.hosts.get(message.host)
        if record is None or record.incarnation != message.incarnation:
            return
        compiling = self._compilation.under_way(message.host)
        self.fail_worker(message.host, message.text)
        at_loss = self._at_loss.pop(record.island, None)
        # Nothing ran on an island that had not joined, and no program is charged for a lost machine.
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
        """Charge the loss of a worker that was killed, which the operating system does if memory is short.

        The tenant with the most memory among those whose programs ran is charged. If no program ran, but tenants had
        arrays on the island, neither a tenant nor the island is charged.
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
        """Charge the failure of an island to the tenants whose programs ran there, instead of to the island."""
        if not running or not self._tenants.are_told_apart:
            return
        self._outbox.to_engine(m.RestartExcused(island))
        self._blame(island, running, is_sure)

    def charge_overrun(self, gang: Gang[GangRun]) -> None:
        """Charge a run that had to be stopped, or whose islands had to restart, to its tenant, once for all islands."""
        for each in gang.node.gangs:
            each.run.overran = True
        if gang.node.number not in self._charged:
            self._charged.add(gang.node.number)
            self._blame(gang.island, {gang.run.launch.program.name: Running(gang.node.tenant, False)}, is_sure=True)

    def _blame(self, island: int, running: Mapping[str, Running], is_sure: bool) -> None:
        for tenant in self._offenses.crashed(self._outbox.seconds, running.values(), is_sure=is_sure):
            problem = self._offenses.launch_problem(tenant, self._outbox.seconds)
            if problem is not None:
                self._history.record("suspended", problem.message, island, tenant=tenant.name)
                self._failures.fail_tenant(tenant, problem)

    def worker_fails(self, host: int, message: m.WorkerFails) -> None:
        """Handle a worker's report that a bug ends it."""
        self.fail_worker(host, f"the worker of host {host} failed: {message.text}")

    def controller_failed(self, host: int, reason: str, is_charged: bool) -> None:
        """Restart the island of a host whose message the controller failed at, since its state is unknown.

        With `is_charged`, the restart does not count against the island.
        """
        island = self._resources.hosts[host].island
        text = f"the controller failed at a message of host {host} ({reason})"
        self._restart(island, text, code=Code.DATA_LOSS)
        if is_charged:
            self._outbox.to_engine(m.RestartExcused(island))

    def never_ready(self, host: int, reason: str) -> None:
        """Restart the island of a worker that connected and was never ready, if the island still waits for it."""
        island = self._resources.islands.get(self._resources.topology.island_of(host))
        if island is not None and not island.works and not island.is_over:
            self._outbox.to_engine(m.RestartIsland(island.number, reason))
            self._fail_island(island.number, Status(Code.DEADLINE_EXCEEDED, reason))

    def relay_lost(self, island: int, reason: str) -> None:
        """Restart an island in a process whose relay is lost. Its hosts may still have their own connections."""
        text = f"the relay of the process of island {island} was lost: {reason}"
        if not self._resources.islands[island].is_over:
            self._outbox.to_engine(m.RestartIsland(island, text))
            self._fail_island(island, Status(Code.DATA_LOSS, f"{text}; its island is restarted, and {_LOST}"))

    def world_failed(self, host: int, message: m.WorldFailed) -> None:
        """Handle that a host cannot join a world: functions of the world are compiled again, in a new one.

        If a session waits for one of them, it gets the error, and so do its launches.
        """
        lost = self._worlds.failed(host, message)
        self._failures.fail_without_functions(lost, self._recompilations.request_again(lost), message.status)

    def engine_joined(self) -> None:
        """Repeat the pending requests to restart islands, since a new engine does not know them."""
        for island in self._resources.islands.values():
            if island.state is IslandState.RESTARTING and island.last_failure is not None:
                self._outbox.to_engine(m.RestartIsland(island.number, island.last_failure.message))

    def known_islands(self) -> tuple[m.KnownIsland, ...]:
        """Return what a spare engine needs to continue in the place of the engine."""
        shapes = self._resources.topology.shapes
        return tuple(
            m.KnownIsland(each.number, shapes[each.number], each.state, each.incarnation, each.machines, each.returns)
            for each in self._resources.islands.values()
        )

    def island_starts(self, message: m.IslandStarts) -> None:
        """Handle the start of a new incarnation. Known workers of an earlier incarnation have ended.

        A controller that was superseded requested the restart.
        """
        resources, island = self._resources, message.island
        hosts = [resources.hosts[host] for host in resources.hosts_of(island) if host in resources.hosts]
        if resources.islands[island].works and any(host.incarnation < message.incarnation for host in hosts):
            text = f"the workers of island {island} were ended at the request of an earlier controller; {_LOST}"
            self._fail_island(island, Status(Code.DATA_LOSS, text))

    def peer_silent(self, host: int, message: m.PeerSilent) -> None:
        """Record that a host has not heard another for longer than the lease. The next tick handles it."""
        self._silent_pairs[min(host, message.host), max(host, message.host)] = message.seconds

    def tick(self, now: float) -> None:
        """Find silent hosts, and gangs and islands that hang. Called once per second."""
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
        if self._charged:
            self._charged &= {gang.node.number for gang in self._in_flight.values()}
        islands = self._resources.islands.values()
        restarting = [each.number for each in islands if each.state is IslandState.RESTARTING]
        for island, seconds in self._restarting.update(now, restarting).items():
            if seconds > self._start_seconds:
                wait = self._pending_reason(island)
                self.remove(island, f"it was not up again within {self._start_seconds:.0f} s{wait and f': {wait}'}")
                self._outbox.to_engine(m.EndIsland(island))

    def _restart_divided(self, now: float) -> None:
        """Restart islands with two hosts that reply to the controller but lost each other."""
        pairs, self._silent_pairs = self._silent_pairs, {}
        for pair, seconds in pairs.items():
            one, other = (self._resources.hosts.get(host) for host in pair)
            leases = self._leases
            are_present = all(leases.has(host) and leases.silence(host, now) < _PRESENT_SECONDS for host in pair)
            if one is not None and other is not None and one.island == other.island and are_present:
                machines = min(one.machine, other.machine), max(one.machine, other.machine)
                is_again = all(machines) and machines in self._divided
                self._divided = dict(list(self._divided.items())[-_MAX_DIVIDED:]) | {machines: now}
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
            error = gang.run.failure or gang.run.launch.error or OK
            is_ended = gang.node.session not in self._sessions or is_of_closed_world(error)
            if seconds > (ENDED_SECONDS if is_ended else HALF_FAILED_SECONDS):
                if self._replace_world(gang, error, hanging):
                    continue
                has_left = self._worlds.has_left(gang.node)
                if seconds <= (2 * HALF_FAILED_SECONDS if has_left else HALF_FAILED_SECONDS):
                    continue
                late = seconds if has_left else 0.0
                named = f"{_not_ended(gang, gang.run.launch.program.name, late)}: {error.message}"
                reason = _not_ended(gang, "a gang", late)
                self.restart_for(gang, reason, named, self._failures.islands_that_wait(gang))

    def _replace_world(self, gang: Gang[GangRun], error: Status, hanging: Mapping[int, Gang[GangRun]]) -> bool:
        """End a gang that waits for another island, where it failed. Other work of the islands is not concerned.

        Return False if the gang has no world. The runs of this world among the `hanging` gangs end as well.
        """
        text = f"{gang.run.launch.program.name} failed on one device, and others waited for it: {error.message}"
        if not self._worlds.replace(gang.node, error.reworded(text), [each.node for each in hanging.values()]):
            return False
        self._history.record("hangs", text, gang.island, gang.node.session, gang.node.tenant.name)
        return True

    # ---- islands

    def _restart(
        self, island: int, reason: str, logged: str = "", code: Code = Code.DEADLINE_EXCEEDED, avoid: int = -1
    ) -> None:
        if self._resources.islands[island].works:
            self._outbox.to_engine(m.RestartIsland(island, logged or reason, avoid))
            self._fail_island(island, Status(code, f"{reason}; its island is restarted, and {_LOST}"))

    def restart_for(self, gang: Gang[GangRun], reason: str, named: str, islands: Sequence[int] | None = None) -> None:
        """Restart the islands of a gang whose hosts have not ended it, or only these `islands`.

        `named` is for operators and the gang's tenant. Other tenants read the `reason`.
        """
        for island in gang.run.islands_left if islands is None else islands:
            if not self._tenants.are_told_apart:
                self._restart(island, named)
            elif self._resources.islands[island].works:
                self._history.record("hangs", named, island, gang.node.session, gang.node.tenant.name)
                self._restart(island, reason, named)
                if gang.run.spec.functions:
                    self._outbox.to_engine(m.RestartExcused(island))
                    self.charge_overrun(gang)

    def _fail_island(self, island: int, status: Status) -> None:
        """Handle the failure of an island because of one of its hosts, unless it is known already."""
        record = self._resources.islands[island]
        if record.state is IslandState.RESTARTING:
            # Hosts that had joined again are lost once more: the island is ready when all have joined.
            self.forget_hosts(island)
        elif not record.is_over:
            self._lifecycle.fail(island, status)

    def forget_hosts(self, island: int) -> set[int]:
        """Forget all workers of the island, which cannot continue without each other. Return their hosts."""
        self._resources.mark_hosts_failed(island)
        hosts = set(self._resources.hosts_of(island))
        for host in hosts:
            self._outbox.forget_host(host)
            self._leases.forget(host)
        return hosts

    def remove(self, island: int, reason: str) -> None:
        """Remove an island, which will not restart. Work that waits for it fails."""
        record = self._resources.islands[island]
        if record.is_over:
            return
        # The elastic training of pathwaysutils expects this code, not UNAVAILABLE, for the loss of a slice.
        status = Status(Code.DATA_LOSS, f"island {island} is removed: {reason}")
        if record.works:
            self._fail_island(island, status)
        self._lifecycle.remove(island, status)

    # ---- subscriptions

    def island_failed(self, lost: IslandFailed) -> None:
        """Forget the workers of an island that has failed."""
        self.forget_hosts(lost.island)

    def island_restarted(self, back: IslandRestarted) -> None:
        """Forget what ran on the island when it was lost: a worker's end that is reported later has another cause."""
        self._at_loss.pop(back.island, None)


def _not_ended(gang: Gang[GangRun], name: str, late: float) -> str:
    """Return text about hosts that have not ended a gang with this name, which has failed.

    If its world was closed, `late` has the seconds since its failure. A host of a closed world may still compute, or
    wait because gloo has lost a message.
    """
    hosts = f"hosts {sorted(gang.run.hosts_left)} of {gang.run.islands_text}"
    if late:
        return f"{hosts} had not ended {name} {late:.0f} s after it failed"
    return f"{hosts} wait for another host, where {name} failed"
