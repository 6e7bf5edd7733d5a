"""The controller: all decisions of a cluster. Events in, actions out.

No I/O, no clock and no randomness: `handle` is the only entry, and decisions leave as actions with the number of the
event that caused them. A program is registered once, and lowered to one plan per host. A launch adds its gangs to the
lines of their islands. Dispatch sends one message per host. On completion, results become ready, memory is freed, and
the client's credits return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from atoll._version import __version__
from atoll.cluster.lifecycle import (
    IslandDrained,
    IslandFailed,
    IslandReady,
    IslandRemoved,
    IslandRestarted,
)
from atoll.cluster.settings import ClusterSettings
from atoll.controller.admission import Admission
from atoll.controller.faults import Faults
from atoll.controller.islands.engine_requests import Agents, EngineMessages
from atoll.controller.islands.island_hosts import HostMessages
from atoll.controller.islands.island_losses import IslandLosses
from atoll.controller.islands.island_recovery import IslandRecovery
from atoll.controller.islands.overruns import Overruns
from atoll.controller.islands.relay_groups import Relays
from atoll.controller.islands.waiting_calls import WaitingCalls
from atoll.controller.named_arrays.published_arrays import PublishedArrays
from atoll.controller.named_arrays.vaults import Vaults
from atoll.controller.operators.requests import Operators
from atoll.controller.operators.service import OperatorService
from atoll.controller.session_persistence import SessionPersistence
from atoll.controller.sessions.detached_sessions import DetachedSessions
from atoll.controller.sessions.inboxes import Inboxes
from atoll.controller.sessions.proxy_requests import ProxyMessages, SliceRequests
from atoll.controller.sessions.queries import Queries
from atoll.controller.sessions.sessions import Sessions
from atoll.controller.state import ClusterState
from atoll.controller.watchdog import Watchdog
from atoll.errors import Status
from atoll.journal.event_log import EventLog
from atoll.launch.compilation import Compilation
from atoll.launch.failures import Failures
from atoll.launch.launches import Launches
from atoll.launch.long_gangs import LongGangs
from atoll.launch.memory_waits import MemoryWait
from atoll.launch.policies import find_policy
from atoll.launch.policy import Policy
from atoll.launch.registry import ProgramRegistry
from atoll.launch.worlds import Worlds
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.internal_programs import InternalPrograms
from atoll.migration.memory_pressure import MemoryPressure
from atoll.migration.migrations import Migrations
from atoll.migration.suspensions import Suspensions
from atoll.named_arrays.named_arrays import NamedArrays
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.protocol.actions import AnyAction, End, StoreEstimates, StoreUsage
from atoll.security.tokens import Tokens
from atoll.state.buffer_directory import SpilledArray
from atoll.state.estimates import Estimates
from atoll.state.programs import RegisteredProgram
from atoll.state.queued_nodes import QueuedNode
from atoll.state.session import GangRun, Session
from atoll.state.stepped_work import Bug
from atoll.state.usage import Meter
from atoll.telemetry.consistency import Checks
from atoll.telemetry.load import LoadRecord
from atoll.telemetry.trace import Trace
from atoll.telemetry.trace_requests import Tracing

_NOTHING: list[AnyAction] = []


class Controller:
    """All decisions of a cluster.

    `version` is that of Atoll, and is used only in texts. `policy` makes the scheduling policy of an island, by default
    that of the settings.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        token: str = "",
        version: str = __version__,
        host_token: str = "",
        policy: Callable[[], Policy] | None = None,
    ) -> None:
        state = self._state = ClusterState.of(settings)
        self.settings = settings
        self.tenants = state.tenants
        self.resources = state.resources
        self.sessions = state.sessions
        self.slices = state.slices
        self.quarantine = state.quarantine
        self.offenses = state.offenses
        self.leases = state.leases
        self.connections = state.connections
        self.history = state.history
        self._outbox = state.outbox
        self.tokens = Tokens(token, host_token, self.tenants.settings)
        self.log = EventLog(settings, version, self.tokens)
        self.meter = Meter()
        self._long_gangs = LongGangs()
        self.agents = Agents(state)
        self.load = LoadRecord()
        links = self.connections
        self._checks = Checks(self, self._outbox, links.hosts, links.sessions, links.away)
        self._make_programs(policy or find_policy(settings.policy))
        self._make_sessions()
        self._operators = Operators(
            state,
            self.migrations,
            self.suspensions,
            self.launches,
            self.published.copies,
            self._recovery.forget_hosts,
            self.agents.pending_reason,
            self.agents.departure_of,
        )
        self._persistence = SessionPersistence(
            state, self._compilation, self._spiller, self.suspensions, self.published.files
        )
        from_operators = OperatorService(
            self,
            state,
            operators=self._operators,
            checks=self._checks,
            log=self.log,
            tracing=self._tracing,
            end_session=self._sessions.end,
            store_usage=self._store_usage,
            stop_asked=self._persistence.stop_asked,
            remove_arrays=self.published.remove,
            tenant_changed=self.launches.scheduler.tenant_changed,
        )
        self._requests = from_operators.waiting
        self._inboxes = Inboxes(
            state.sessions,
            self._proxy_messages.handle,
            self._sessions.end,
            state.discards,
        )
        self._admission = Admission(
            state,
            tokens=self.tokens,
            version=version,
            sessions=self._sessions,
            detached=self.detached,
            from_proxy=self._inboxes.received,
            hosts=self._host_messages,
            recovery=self._recovery,
            relays=self._relays,
            agents=self.agents,
            from_engine=EngineMessages(self._recovery, self.agents, self._operators).received,
            from_operator=from_operators.received,
        )
        self.watchdog = Watchdog(state, self.launches, self._compilation, self._queries, self.published.names)
        self._faults = Faults(state, self._recovery, self._sessions.end, self.programs.abandon, self._requests.end)
        self._backlog = self._work_in_steps()
        # Of sessions that wait for an event of any kind, so that each flush looks whether it has occurred.
        self._waiting = (
            self.detached.until,
            self._admission.name_waits,
            self.suspensions.by_session,
            self.migrations.under_way,
        )
        self._subscribe()
        self._handlers: dict[type[Any], Callable[[Any], list[AnyAction] | None]] = {
            e.Received: self._admission.received,
            e.Flush: self._flush,
            e.Started: self._started,
            e.ConnectionOpened: self._admission.opened,
            e.ConnectionLost: self._admission.lost,
            e.TimerEnded: self._admission.timer_ended,
            e.Tick: self._tick,
            e.StopAsked: self._stop,
            e.EstimatesRead: self._estimates_read,
            e.Restarted: self._restarted,
            e.SessionsPersisted: self._sessions_persisted,
            e.ConnectionAway: self._admission.away,
            e.ConnectionBack: self._admission.back,
            e.Skipped: self._faults.skipped,
        }

    def _make_programs(self, policy: Callable[[], Policy]) -> None:
        """Make the parts that handle programs, from their registration to their end."""
        state = self._state
        self.trace = Trace()
        self.launches = Launches(state, self, trace=self.trace, policy=policy)
        self.scheduler = self.launches.scheduler
        self.ledger = self.launches.reservations.ledger
        self._tracing = Tracing(self.trace, self.sessions, self._outbox, self._ping_hosts)
        self._failures = Failures(state, self.launches)
        self._worlds = Worlds(state, self.launches)
        self._compilation = Compilation(
            state,
            scheduler=self.scheduler,
            meter=self.meter,
            worlds=self._worlds,
            failures=self._failures,
        )
        self.functions = self._compilation.functions
        self._estimates = Estimates(self.functions.contents, self.resources.hosts)
        self.programs = ProgramRegistry(
            state,
            compilation=self._compilation,
            large_plans=self.launches.large_plans,
            meter=self.meter,
            estimates=self._estimates,
        )

    def _make_sessions(self) -> None:
        """Make the parts that open, migrate and suspend sessions, and handle the hosts that they run on."""
        state = self._state
        self._queries = Queries(state, self.ledger)
        own = self._internal = InternalPrograms(self.programs, self.launches.launcher, self._outbox)
        spiller = self._spiller = ArraySpiller(state, self.launches, own)
        self.migrations = Migrations(
            state, self.launches, self._compilation, self.programs, own, spiller, self._queries.is_waiting
        )
        self.suspensions = Suspensions(state, self.launches, self.migrations, spiller, self.slices, self.history)
        pressure = self._pressure = MemoryPressure(state, self.launches.reservations, spiller, self.suspensions)
        self._relays = Relays(state, self.launches.gang_ends, self._hosts_answered)
        self._recovery = IslandRecovery(
            state,
            launches=self.launches,
            failures=self._failures,
            compilation=self._compilation,
            pending_reason=self.agents.pending_reason,
            departure_of=self.agents.departure_of,
            broken=self._relays.broken,
            worlds=self._worlds,
        )
        self._losses = IslandLosses(
            state,
            launches=self.launches,
            failures=self._failures,
            compilation=self._compilation,
            queries=self._queries,
        )
        self._overruns = Overruns(state, self.launches, self._recovery, self._worlds)
        self._waiting_calls = WaitingCalls(state, self.launches)
        self._slice_requests = SliceRequests(state, self.ledger.free, pressure.evict_for, self._overruns.islands)
        self._sessions = Sessions(state)
        self.detached = DetachedSessions(state, self._sessions, self._failures, self.suspensions)
        self.vaults = Vaults(state, self._sessions, self.launches)
        self.published = PublishedArrays(state, self.vaults, self.launches, own, spiller)
        self._proxy_messages = ProxyMessages(
            state,
            sessions=self._sessions,
            compilation=self._compilation,
            programs=self.programs,
            launches=self.launches,
            migrations=self.migrations,
            suspensions=self.suspensions,
            tracing=self._tracing,
            others=self._messages_of_proxies(),
        )
        self._host_messages = HostMessages(
            state,
            self.launches,
            self.programs,
            self.ledger,
            self._tracing,
            self._overruns,
            self._compilation,
            self._messages_of_hosts(),
        )

    def _messages_of_proxies(self) -> Mapping[type[Any], Callable[[Session, Any], None]]:
        """Return the handlers of proxies' messages that only one part handles."""
        return {
            m.Launch: self.launches.launcher.launch_within_window,
            m.RegisterFunction: self._compilation.register,
            m.Recompile: self._compilation.recompile,
            m.Query: self._queries.ask,
            m.FailureAcknowledged: self._losses.failure_acknowledged,
            m.AddSlice: self._slice_requests.add,
            m.ReleaseSlice: self._slice_requests.release,
            m.HandlesReported: self._checks.held,
            m.Publish: self.published.publish,
            m.OpenVersion: self.published.open_version,
            m.ReadVersion: self.published.reads.read,
            m.CloseVersion: self.published.close_version,
        }

    def _messages_of_hosts(self) -> Mapping[type[Any], Callable[[int, Any], None]]:
        """Return the handlers of workers' messages that only one part handles."""
        return {
            m.RunProgress: self.launches.delegated_runs.progressed,
            m.RunsRevoked: self.launches.revocations.runs_revoked,
            m.RowsMoved: self.launches.gang_ends.rows_moved,
            m.PeerSilent: self._recovery.peer_silent,
            m.WorkerFails: self._recovery.worker_fails,
            m.FeedsArrived: self._proxy_messages.feeds_arrived,
            m.Compiled: self._compilation.compiled,
            m.PlanRegistered: self.programs.plan_registered,
            m.WorldServed: self._worlds.served,
            m.WorldFailed: self._recovery.world_failed,
            m.NeedsWorld: self._compilation.needs_world,
            m.StoresReported: self._checks.reported,
            m.WorkerAnswer: self._queries.answered,
            m.SpillReply: self._spiller.spill_replied,
            m.SendSpilledFailed: self._spiller.failed,
            **self._relays.handlers,
        }

    def _subscribe(self) -> None:
        """Subscribe to the states of islands and the ends of sessions.

        Each order decides the order of messages, so another order needs another value of the setting `decisions`. The
        comments name what a part relies on.
        """
        lifecycle = self._state.lifecycle
        self.history.subscribe(lifecycle)
        lifecycle.subscribe(
            IslandReady,
            self._operators.island_ready,
            self._persistence.island_ready,
            self.published.copies.island_ready,
            self.published.files.island_ready,
            self._spiller.island_ready,
            self._worlds.start_waiting,
        )
        lifecycle.subscribe(
            IslandFailed,
            self._island_leaves,  # before gangs are dropped from lines that the island shares
            self._recovery.island_failed,  # marks the hosts as failed: the others then send them nothing
            self._losses.island_failed,  # fails launches and arrays, and what impatient sessions wait for
            self._compilation.recompilations.island_failed,  # ends the waits that have not failed
            self.published.island_failed,  # finds the versions whose arrays have failed
            self.detached.island_failed,
            self.migrations.abort_on_island,
            self._operators.drains.island_failed,  # after the migrations from there
            self.suspensions.lose_spilled_arrays,
            self.published.files.island_lost,
            self._relays.forget_groups,
            self.programs.require_plans_again,  # for launches that have survived
            self._admission.hosts.introduce_remaining_hosts,  # also forms groups of relays in place of those forgotten
            self._worlds.close_worlds_of,  # looks at the gangs that are still in flight
        )
        lifecycle.subscribe(
            IslandRestarted,
            self._worlds.start_waiting,
            self._recovery.island_restarted,
            self._losses.island_restarted,
            self.published.copies.island_ready,
            self.published.files.island_ready,
            self._spiller.island_ready,
            self._operators.island_restarted,  # last: it reports that the island is up
        )
        lifecycle.subscribe(
            IslandRemoved,
            self._island_leaves,
            self._worlds.close_worlds_of,
            self._losses.island_removed,
            self._operators.island_removed,  # last: for a new island, it enters DRAINED, which notifies the next ones
        )
        lifecycle.subscribe(
            IslandDrained,
            self._island_leaves,
            self._losses.island_drained,
            self.migrations.abort_on_island,
            self.suspensions.lose_spilled_arrays,
            self._relays.forget_groups,
            self._worlds.close_worlds_of,
            self.published.island_drained,
            self.published.files.island_drained,
            self._operators.drains.island_drained,  # last: the engine ends the workers
        )
        self._sessions.subscribe(
            self.detached.session_closed,
            self.vaults.session_closed,
            self.published.session_closed,
            self.migrations.session_closed,
            self.suspensions.session_closed,
            self.launches.session_closed,
            self._tracing.session_closed,
            self._checks.session_closed,
            self._host_messages.session_closed,  # after the messages about gangs that do not start
            self._queries.session_closed,
            self.programs.session_closed,
            self._compilation.session_closed,
            self._overruns.session_closed,  # looks at the gangs that are still in flight
            self._inboxes.session_closed,
        )

    def _island_leaves(self, lost: IslandFailed | IslandRemoved | IslandDrained) -> None:
        self.scheduler.island_leaves(lost.island)

    @property
    def named_arrays(self) -> NamedArrays:
        return self.published.names

    # ---- events

    def handle(self, event: e.AnyEvent) -> list[AnyAction]:
        """Decide what follows from the event. Actions are returned at `Flush`, all at once and in order.

        Raises an AtollError for a message that no correct peer sends: treat its connection as lost. Any other exception
        is a bug (`controller.faults`).
        """
        self.log.record(event)
        outbox = self._outbox
        outbox.cause += 1
        outbox.seconds = self.meter.now = self.scheduler.now = event.seconds
        return self._handlers[type(event)](event) or _NOTHING

    def _started(self, event: e.Started) -> None:
        """Do nothing, since the event only records a time."""

    def _restarted(self, event: e.Restarted) -> None:
        """Record the restart. No decision changes: peers reconnect, or are lost one by one."""
        self.trace.skip(event.seconds, event.skipped)
        self.history.record("controller restarted", f"it continues in term {event.term}")

    def _sessions_persisted(self, event: e.SessionsPersisted) -> None:
        found = self._persistence.restore(event, self._admission.admit_again)
        self._sessions.next_number = found.next_session
        if found.arrays is not None:
            self.published.files.restore_persisted(found.arrays)

    def _estimates_read(self, event: e.EstimatesRead) -> None:
        self._estimates.load(event.estimates)

    @property
    def has_work(self) -> bool:
        """Whether another `Flush` must follow the last one although no other event has occurred."""
        return any(self._backlog)

    def _work_in_steps(self) -> tuple[Collection[Any], ...]:
        """Return the containers of work that flushes do in steps. All are empty if there is no such work."""
        programs, large = self.programs, self.launches.large_launches
        return (
            programs.lowerings.waiting,
            self._state.discards.waiting,
            self._inboxes.waiting,
            self._requests.waiting,
            *self.published.backlog,
            self.migrations.working,
            self._spiller.working,
            large.beginning,
            large.ended,
            self._state.remains.waiting,
            self._compilation.releases.due,
        )

    def bugs(self) -> list[tuple[Bug, tuple[int, ...], tuple[int, ...]]]:
        """Return the bugs that have changed nothing, with the connections and the sessions to end by `Skipped`."""
        sessions = [*self._inboxes.failed.items(), *self.programs.lowerings.failed.items()]
        connections = [(bug, (number,), ()) for number, bug in self._requests.failed.items()]
        return [*connections, *((bug, (), (number,)) for number, bug in sessions)]

    def parts(self) -> dict[str, Any]:
        """Return the parts that have state, by the names that dumps use: see `controller_dumps`."""
        return {
            **self._state.parts(),
            "log": self.log,
            "meter": self.meter,
            "long gangs": self._long_gangs,
            "agents": self.agents,
            "load": self.load,
            "checks": self._checks,
            "trace": self.trace,
            "tracing": self._tracing,
            "failures": self._failures,
            "compilation": self._compilation,
            "compile watch": self._compilation.watch,
            "function releases": self._compilation.releases,
            "functions": self.functions,
            "worlds": self._worlds,
            "estimates": self._estimates,
            "programs": self.programs,
            "lowerings": self.programs.lowerings,
            **self.launches.parts(),
            "queries": self._queries,
            "internal programs": self._internal,
            "array spiller": self._spiller,
            "migrations": self.migrations,
            "suspensions": self.suspensions,
            "memory pressure": self._pressure,
            "slice requests": self._slice_requests,
            "relays": self._relays,
            "recovery": self._recovery,
            "overruns": self._overruns,
            "waiting calls": self._waiting_calls,
            "sessions": self._sessions,
            "engine role": self._admission.engine_role,
            "name waits": self._admission.name_waits,
            "session leases": self._sessions.leases,
            "detached sessions": self.detached,
            "operators": self._operators,
            "drains": self._operators.drains,
            "requests": self._requests,
            "inboxes": self._inboxes,
            "admission": self._admission,
            "session persistence": self._persistence,
            "watchdog": self.watchdog,
            "vaults": self.vaults,
            **self.published.parts(),
        }

    def is_charged(self, event: e.Skipped) -> bool:
        """Return whether a tenant is charged for the bug that this event reports."""
        return self._faults.charged(event) is not None

    def _flush(self, event: e.Flush) -> list[AnyAction]:
        self.log.trim()
        launches = self.launches
        if self.has_work:
            self.programs.lowerings.proceed(event.steps)
            launches.large_launch_steps.proceed(event.steps)
            launches.large_launches.clear_ended(event.steps)
            self._state.discards.proceed(event.steps)
            self._state.remains.proceed(event.steps)
            self._requests.proceed()
            self._inboxes.proceed(event.steps)
            self._spiller.proceed()
        self._inboxes.turn_ended()
        self.published.proceed()
        if any(self._waiting):
            self.detached.proceed(self._inboxes.waiting)
            self._admission.open_named_sessions()
            self.suspensions.proceed()
            self.migrations.proceed()
        launches.queue.release_delayed()
        launches.gang_starts.start_ready()
        if launches.reservations.waits.waiting:
            launches.reservations.waits.seek_relief()
            launches.gang_starts.start_ready()  # published arrays may have been freed at once
        self._compilation.releases.proceed()
        launches.gang_starts.publish_frees()
        return self._outbox.take()

    def _tick(self, event: e.Tick) -> None:
        """Find what is silent, hangs or waits in vain. Called once per second."""
        self.trace.skip(event.seconds, event.skipped)
        self._ping_hosts(event.seconds)
        self._outbox.return_waiting_credits()
        self.load.record(event.load)
        now = event.seconds
        if not self.resources.is_complete:
            self._admission.engine_role.tick(now)
            return
        for number, status in self._sessions.silent(now):
            self.detached.client_silent(number, status)
        self._sessions.tick(now)
        self.detached.tick(now)
        self._admission.refuse_late(now)
        self._recovery.tick(now)
        self._admission.engine_role.tick(now)
        self._overruns.tick(now)
        self._waiting_calls.tick(now)
        self._compilation.tick(now)
        self.migrations.tick(now)
        self.suspensions.tick(now)
        self._operators.tick(now)
        self._checks.tick(now)
        self.published.tick(now)
        self._tracing.tick(now)
        self._failures.tick(now)
        self.watchdog.tick(now)
        self._long_gangs.tick(now, self.launches.in_flight)
        self._store_usage()
        self._store_estimates(now)

    def _ping_hosts(self, now: float) -> None:
        connections = self.connections
        hosts = connections.hosts if not connections.away else connections.present_hosts()
        compiles = self._compilation.questions(now, hosts)
        behind = self._relays.responsive(hosts, now)
        if behind and compiles:
            behind = [host for host in behind if host not in compiles]
        if behind:
            self._outbox.ask(tuple(behind), lambda some: round(self.leases.min_left(some, now), 1), now)
        directly = hosts.keys() - set(behind) if behind else hosts
        left = {host: round(self.leases.left(host, now), 1) for host in directly}
        pings = {seconds: m.Ping(seconds, now) for seconds in left.values()}
        for host in sorted(left, key=lambda host: (left[host], host)):  # equal messages in sequence are encoded once
            ping = pings[left[host]]
            self._outbox.to_host(host, m.Ping(ping.lease, now, tuple(compiles[host])) if host in compiles else ping)

    def _hosts_answered(self, pongs: Sequence[m.RelayedPong]) -> None:
        self._host_messages.answered(pongs)

    def _store_usage(self) -> None:
        present, usage = self.meter.take(self.resources.device_count)
        if present or usage:
            self._outbox.add(StoreUsage(self._outbox.cause, present, usage))

    def _store_estimates(self, now: float) -> None:
        changes = self._estimates.changes(now)
        if changes:
            self._outbox.add(StoreEstimates(self._outbox.cause, changes))

    def _stop(self, event: e.StopAsked) -> None:
        self._store_usage()
        self._store_estimates(math.inf)
        self._persistence.stopping(event.persist_sessions, self.settings.suspended_seconds)
        for host, connection in list(self.connections.hosts.items()):
            self._outbox.to_host(host, m.Stop())
            self._outbox.close(connection)
        for connection in list(self.connections.relays.values()):
            self._outbox.close(connection)
        self.agents.dismiss()
        self._outbox.add(End(self._outbox.cause))

    # ---- LaunchServices

    def drop_program(self, program: RegisteredProgram) -> None:
        self.programs.drop(program)

    def restore_spilled(self, session: Session, handles: Sequence[int]) -> None:
        self._spiller.restore(session, handles)

    def drop_spilled(self, session: Session, spilled: SpilledArray) -> None:
        self._spiller.drop(session, spilled)

    def cause_of(self, node: QueuedNode[GangRun]) -> Status | None:
        return self._worlds.cause_of(node)

    def reclaim(self, waiting: MemoryWait, missing: int, is_last: bool) -> bool:
        node, device, relief = waiting.node, waiting.device, self.published.relief
        waited = self.launches.reservations.waits.now - node.since
        if waiting.quota is not None:
            return relief.free_quota(node.tenant, waiting.quota.place(device), missing, waited, is_last)
        is_searching = relief.free(node.tenant, device, missing, waited, is_last)
        is_possible = is_searching and (is_last or self.vaults.is_freeing)
        if waiting.nbytes <= self.ledger.free(device) or is_possible:
            return True
        return self._pressure.reclaim(waiting, is_last)
