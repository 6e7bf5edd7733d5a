"""The controller: everything that a cluster decides. Events in, actions out.

No I/O, no clock and no randomness: `handle` is the one way in, and what it decides leaves as actions, with the number
of the event that led to each. The path of a request is: register a program once (it is lowered to one plan a host);
launch it (its gangs join their islands' lines); dispatch (one message per host); completion (results become ready,
memory goes, the client's credits return).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from atoll._version import __version__
from atoll.cluster.lifecycle import (
    IslandBack,
    IslandDrained,
    IslandGivenUp,
    IslandLost,
    IslandReady,
    Lifecycle,
)
from atoll.cluster.locations import DeviceLocation
from atoll.cluster.placement import Slices
from atoll.cluster.processes.leases import Leases
from atoll.cluster.resources import ResourceManager
from atoll.cluster.settings import ClusterSettings
from atoll.controller.admission import Admission
from atoll.controller.islands.agents import Agents
from atoll.controller.islands.engines import EngineMessages
from atoll.controller.islands.hosts import Hosts
from atoll.controller.islands.recovery import Recovery
from atoll.controller.islands.relays import Relays
from atoll.controller.operators.requests import Operators
from atoll.controller.operators.service import OperatorService
from atoll.controller.sessions.queries import Queries
from atoll.controller.sessions.sessions import Sessions
from atoll.controller.sessions.slices import SliceRequests
from atoll.controller.sessions.staying import SessionsThatStay
from atoll.dispatch.compilation import Compilation
from atoll.dispatch.connections import Connections
from atoll.dispatch.failures import Failures
from atoll.dispatch.launcher import Launcher
from atoll.dispatch.outbox import Outbox
from atoll.dispatch.registry import ProgramRegistry
from atoll.errors import invalid
from atoll.journal.event_log import EventLog
from atoll.migration.asides import Asides
from atoll.migration.migrations import Migrations
from atoll.migration.own_programs import OwnPrograms
from atoll.migration.pressure import Pressure
from atoll.migration.suspensions import Suspensions
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.protocol.actions import AnyAction, End, KeepEstimates, KeepUsage
from atoll.scheduling.estimates import Estimates
from atoll.scheduling.long_gangs import LongGangs
from atoll.scheduling.policies import find_policy
from atoll.scheduling.programs import RegisteredProgram
from atoll.scheduling.quarantine import Quarantine
from atoll.scheduling.session import Session
from atoll.scheduling.tenants import Tenants
from atoll.scheduling.usage import Meter
from atoll.security.tokens import Tokens
from atoll.telemetry.checks import Checks
from atoll.telemetry.history import History
from atoll.telemetry.load import LoadRecord
from atoll.telemetry.tracing import Tracing

_NOTHING: list[AnyAction] = []


class Controller:
    """All decisions of a cluster. `version` is that of Atoll, and is for texts only."""

    def __init__(
        self, settings: ClusterSettings, token: str = "", version: str = __version__, host_token: str = ""
    ) -> None:
        self.settings: ClusterSettings = settings
        self.tenants = Tenants(settings.tenants)
        self.tokens = Tokens(token, host_token, self.tenants.settings)
        self.log = EventLog(settings, version, self.tokens)
        self.resources = ResourceManager(settings.topology)
        self.sessions: dict[int, Session] = {}
        self.slices = Slices()
        self.quarantine = Quarantine()
        self.leases = Leases(settings.lease_seconds)
        self.meter = Meter()
        self._long_gangs = LongGangs()
        self.connections = Connections()
        self._outbox = Outbox(self.connections)
        self.agents = Agents(self.connections, self._outbox)
        self.load = LoadRecord()
        self.history = History(self._outbox.time)
        self._lifecycle = Lifecycle(self.resources.islands)
        links = self.connections
        self._checks = Checks(self, self._outbox, links.hosts, links.sessions, links.away)
        self._make_programs(settings)
        self._make_sessions(settings)
        self._operators = Operators(
            self.sessions,
            self.resources,
            self._lifecycle,
            self.slices,
            self.migrations,
            self.suspensions,
            self.launcher,
            self._recovery.forget_hosts,
            self._outbox,
            settings.start_seconds,
            self.agents.wait_of,
            self.history,
        )
        self._subscribe()
        self._admission = Admission(
            settings,
            self.tokens,
            self.tenants,
            version,
            self.connections,
            self._outbox,
            self.resources,
            self._sessions,
            self._hosts,
            self._recovery,
            self._relays,
            self.agents,
            self.leases,
            EngineMessages(self._recovery, self.agents, self._operators).received,
            OperatorService(
                self,
                self.tenants,
                self._operators,
                self._checks,
                self._outbox,
                self.log,
                self._tracing,
                self._sessions.end,
                self._keep_usage,
                self._stop_requested,
            ).received,
        )
        self._staying = SessionsThatStay(
            self.sessions,
            self.connections,
            self._outbox,
            self.resources,
            self.slices,
            self.tenants,
            self._compilation,
            self._asides,
            self.suspensions,
            self._admission.admit_again,
        )
        self._lifecycle.subscribe(IslandReady, self._staying.island_ready)
        self._lifecycle.subscribe(IslandLost, self._admission.island_lost)
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
            e.SessionsKept: self._sessions_kept,
            e.ConnectionAway: self._admission.away,
            e.ConnectionBack: self._admission.back,
        }

    def _make_programs(self, settings: ClusterSettings) -> None:
        """What programs need: from their registration to their ends."""
        self.launcher = Launcher(
            self.resources,
            self.sessions,
            self._outbox,
            self._drop_program,
            self.quarantine,
            settings.sequential,
            find_policy(settings.policy),
            settings.static_seconds,
        )
        self.scheduler = self.launcher.scheduler
        self.memory = self.launcher.memory.ledger
        self.trace = self.launcher.trace
        self._tracing = Tracing(self.trace, self.sessions, self._outbox, self._ping_hosts)
        self._failures = Failures(self.launcher, self.resources, self.sessions)
        self._compilation = Compilation(
            self.resources, self.sessions, self._outbox, self.quarantine, self.scheduler, self.meter, _location
        )
        self.functions = self._compilation.functions
        self._estimates = Estimates(self.functions.contents, self.resources.hosts)
        self.programs = ProgramRegistry(
            self._compilation, self._outbox, self.launcher.large_plans, self.meter, self._estimates
        )

    def _make_sessions(self, settings: ClusterSettings) -> None:
        """Sessions, and the hosts that they run on."""
        queries = Queries(self.resources, self.sessions, self._outbox, _location, self.memory)
        own = OwnPrograms(self.programs, self.launcher, self._outbox)
        asides = self._asides = Asides(self.sessions, self.resources, self.launcher, own, self._outbox)
        self.launcher.bring_back = asides.bring_back
        self.launcher.buffers.on_aside_freed = asides.drop
        self.migrations = Migrations(
            self.resources, self._compilation, queries, self.launcher, self.programs, own, asides, self._outbox
        )
        self.suspensions = Suspensions(
            self.migrations,
            asides,
            self.resources,
            self.slices,
            self.launcher,
            self.history,
            self._outbox,
            settings.suspend_folder,
        )
        pressure = Pressure(
            self.sessions,
            self.launcher.memory,
            self.slices,
            asides,
            self.suspensions,
            settings.spill,
            settings.suspend_lower,
        )
        self._relays = Relays(self.resources, self._outbox, self.launcher, settings.relay_group)
        self._recovery = Recovery(
            self.resources,
            self._lifecycle,
            self.sessions,
            self._outbox,
            self.launcher,
            self._failures,
            self._compilation,
            queries,
            self.quarantine,
            self.leases,
            settings,
            self.agents.wait_of,
            self._relays.broken,
            self.tenants,
            self.history,
        )
        self._sessions = Sessions(
            self.sessions,
            self.connections,
            self._outbox,
            self.resources,
            self.slices,
            SliceRequests(
                self.sessions, self.resources, self.slices, self.memory.free, pressure.make_way, self._outbox
            ),
            self._compilation,
            self.programs,
            self.launcher,
            queries,
            self.migrations,
            self.suspensions,
            self._recovery,
            settings.lease_seconds,
            self.history,
            self._tracing,
            self._checks,
        )
        self._hosts = Hosts(
            self.resources,
            self._lifecycle,
            self.sessions,
            self._outbox,
            self.launcher,
            self._compilation,
            self.programs,
            queries,
            self._sessions,
            self.memory,
            settings.device_memory,
            self._recovery.peer_silent,
            self._relays,
            self._tracing,
            asides,
            self._checks,
        )

    def _subscribe(self) -> None:
        """Who learns of an island's life, in which order."""
        self.history.subscribe(self._lifecycle)
        subscribe = self._lifecycle.subscribe
        subscribe(IslandReady, self._operators.island_ready)
        subscribe(IslandLost, self._recovery.island_lost)
        subscribe(IslandLost, self.migrations.island_lost)
        subscribe(IslandLost, self.suspensions.island_lost)
        subscribe(IslandLost, self._relays.island_lost)
        subscribe(IslandLost, self.programs.island_lost)
        subscribe(IslandBack, self._recovery.island_back)
        subscribe(IslandBack, self._operators.island_back)
        subscribe(IslandGivenUp, self._recovery.island_given_up)
        subscribe(IslandGivenUp, self._operators.island_given_up)
        subscribe(IslandDrained, self._operators.drains.island_drained)

    # ---- events

    def handle(self, event: e.AnyEvent) -> list[AnyAction]:
        """Decides what follows from the event. What is to be done is returned at `Flush`, all at once and in order.

        May raise for a message that no correct peer sends: its connection is to be treated as lost.
        """
        self.log.record(event)
        outbox = self._outbox
        outbox.cause += 1
        outbox.seconds = self.meter.now = self.scheduler.now = event.seconds
        return self._handlers[type(event)](event) or _NOTHING

    def _started(self, event: e.Started) -> None:
        """Nothing follows: it is there to have a time."""

    def _restarted(self, event: e.Restarted) -> None:
        """Nothing that was decided changes: peers come back, or are lost one by one."""
        self.history.record("controller restarted", f"it goes on as number {event.term}")

    def _sessions_kept(self, event: e.SessionsKept) -> None:
        self._sessions.next_number = self._staying.take(event)

    def _stop_requested(self, operator: int, message: m.StopRequest) -> None:
        self._staying.stop_asked(operator, message)

    def _estimates_read(self, event: e.EstimatesRead) -> None:
        self._estimates.load(event.estimates)

    def _flush(self, event: e.Flush) -> list[AnyAction]:
        self.log.trim()
        self.suspensions.proceed()
        self.migrations.proceed()
        self.launcher.pump()
        self.launcher.memory.seek_relief()
        self._compilation.release_late()
        return self._outbox.take()

    def _tick(self, event: e.Tick) -> None:
        """Once a second: looks for what is silent, hangs, or waits in vain."""
        self._ping_hosts(event.seconds)
        self.load.record(event.load)
        if not self.resources.is_complete:
            return
        now = event.seconds
        self._sessions.tick(now)
        self._recovery.tick(now)
        self.migrations.tick(now)
        self.suspensions.tick(now)
        self._operators.tick(now)
        self._checks.tick(now)
        self._tracing.tick(now)
        self._failures.tick(now)
        self._long_gangs.tick(now, self.launcher.in_flight)
        self._keep_usage()
        self._keep_estimates(now)

    def _ping_hosts(self, now: float) -> None:
        away = self.connections.away
        there = [host for host, connection in self.connections.hosts.items() if connection not in away]
        left = {host: round(self.leases.left(host, now), 1) for host in there}
        pings = {seconds: m.Ping(seconds, now) for seconds in left.values()}
        for host in sorted(left, key=lambda host: left[host]):  # those who get the same in a row: it is encoded once
            self._outbox.to_host(host, pings[left[host]])

    def _keep_usage(self) -> None:
        present, usage = self.meter.take(self.resources.device_count)
        if present or usage:
            self._outbox.add(KeepUsage(self._outbox.cause, present, usage))

    def _keep_estimates(self, now: float) -> None:
        changes = self._estimates.changes(now)
        if changes:
            self._outbox.add(KeepEstimates(self._outbox.cause, changes))

    def _stop(self, event: e.StopAsked) -> None:
        self._keep_usage()
        self._keep_estimates(math.inf)
        self._staying.stopping(event.keeps_sessions, self.settings.suspended_seconds)
        for host, connection in list(self.connections.hosts.items()):
            self._outbox.to_host(host, m.Stop())
            self._outbox.close(connection)
        self.agents.dismiss()
        self._outbox.add(End(self._outbox.cause))

    def _drop_program(self, program: RegisteredProgram) -> None:
        self.programs.drop(program)


def _location(session: Session, device: int) -> DeviceLocation:
    location = session.devices.locations.get(device)
    if location is None:
        raise invalid(f"device {device} does not exist")
    return location
