"""Sessions: how they open and close, and what their proxies ask.

Invariant: when a session is over, all that it owned is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.cluster.placement import Slices
from atoll.cluster.processes.leases import CLIENT_LEASES, Leases
from atoll.cluster.resources import ResourceManager
from atoll.controller.islands.recovery import Recovery
from atoll.controller.sessions.queries import Queries
from atoll.controller.sessions.slices import SliceRequests
from atoll.dispatch.compilation import Compilation
from atoll.dispatch.connections import Connections
from atoll.dispatch.launcher import Launcher
from atoll.dispatch.outbox import Outbox
from atoll.dispatch.registry import ProgramRegistry
from atoll.errors import OK, Code, Status, StatusError, invalid
from atoll.migration.migrations import Migrations
from atoll.migration.suspensions import Suspensions
from atoll.protocol import messages as m
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.checks import LAUNCH_WINDOW
from atoll.scheduling.session import Session
from atoll.scheduling.tenants import Tenant
from atoll.telemetry.checks import Checks
from atoll.telemetry.history import History
from atoll.telemetry.tracing import Tracing

# Feeds that a session may have uploaded ahead of the launches that use them.
MAX_EARLY_FEEDS = 65536


class Sessions:
    """Opens sessions, handles what their proxies send, and closes them. `sessions` has those that are open."""

    def __init__(
        self,
        sessions: dict[int, Session],
        connections: Connections,
        outbox: Outbox,
        resources: ResourceManager,
        slices: Slices,
        slice_requests: SliceRequests,
        compilation: Compilation,
        programs: ProgramRegistry,
        launcher: Launcher,
        queries: Queries,
        migrations: Migrations,
        suspensions: Suspensions,
        recovery: Recovery,
        lease_seconds: float,
        history: History,
        tracing: Tracing,
        checks: Checks,
    ) -> None:
        self._sessions = sessions
        self._connections = connections
        self._outbox = outbox
        self._resources = resources
        self._slices = slices
        self._compilation = compilation
        self._programs = programs
        self._launcher = launcher
        self._migrations = migrations
        self._suspensions = suspensions
        self._recovery = recovery
        self._lease_seconds = lease_seconds
        self._history = history
        self._tracing = tracing
        self._checks = checks
        self.next_number = 1  # of a session
        self.leases = Leases(CLIENT_LEASES * lease_seconds)  # of proxies, by session
        # The most frequent messages have handlers that take them as they are.
        self._handlers: dict[type[Any], Callable[[Session, Any], None]] = {
            m.Launch: launcher.launch_within_window,
            m.Release: self._release,
            m.Await: self._await,
            m.RegisterProgram: self._register_program,
            m.ReleaseProgram: self._release_program,
            m.RegisterSwitch: self._register_irregular,
            m.RegisterLoop: self._register_irregular,
            m.RegisterFunction: compilation.register,
            m.CompileAgain: compilation.again,
            m.ReleaseFunction: self._release_function,
            m.LossAcknowledged: self._loss_acknowledged,
            m.MakeError: self._make_error,
            m.Query: queries.ask,
            m.AddSlice: slice_requests.add,
            m.ReleaseSlice: self._release_slice,
            m.Quiesced: self._quiesced,
            m.Pong: self._answered,
            m.LeavesIslands: self._leaves_islands,
            m.FailOnLoss: self._fail_on_loss,
            m.CallsRecorded: self._calls_recorded,
            m.HandlesReported: checks.held,
        }
        self._slice_requests = slice_requests

    # ---- opening and closing

    def open(self, connection: int, secret: str, pid: int, label: str, tenant: Tenant, platform: str = "") -> Session:
        """A session of that tenant on this connection, which counts among those that the tenant has.

        Its devices are of one platform: JAX lowers a program for the one of its client.

        Raises NOT_FOUND where the cluster is to have none of that platform, UNAVAILABLE where no island can take it.
        """
        platform = self._resources.platform_for(platform)
        virtual, locations = self._resources.virtual_devices(platform)
        if not virtual:
            what = f"{platform} devices" if len(self._resources.topology.platforms) > 1 else "devices"
            raise StatusError(
                Code.UNAVAILABLE,
                f"the cluster has no {what} for a new session: {self._resources.states_text()}. "
                "Its operator can start an island with `atoll add-island`",
            )
        open_ones = tuple(each for each in virtual if not self._slices.closed(self.next_number, locations[each.id]))
        if not open_ones:
            raise StatusError(Code.UNAVAILABLE, "all devices of the cluster are in exclusive slices of other sessions")
        virtual, locations = open_ones, {each.id: locations[each.id] for each in open_ones}
        devices = self._slices.open(self.next_number, virtual, locations)
        session = Session(self.next_number, pid, label, secret, devices, platform, tenant)
        self.next_number += 1
        number = session.number
        self._history.record("session opened", session.label or f"process {pid}", -1, number, tenant.name)
        self._sessions[number] = session
        self._connections.sessions[number] = connection
        for host in self._resources.hosts:
            self._outbox.to_host(host, m.OpenStore(number, secret))
        first = self._resources.hosts[virtual[0].host]
        addresses = self._resources.addresses()
        self._outbox.to_session(
            number,
            m.Welcome(
                number,
                secret,
                virtual,
                addresses,
                first.platform,
                first.platform_version,
                min(LAUNCH_WINDOW, session.tenant.settings.launches or LAUNCH_WINDOW),
                self._lease_seconds,
            ),
        )
        for island, hosts in self._resources.away().items():
            failure = self._resources.islands[island].last_failure
            session.unseen[island] = failure or Status(Code.DATA_LOSS, f"island {island} restarts")
            self._outbox.to_session(number, m.HostsLost(hosts))
        return session

    def close(self, number: int, status: Status = OK) -> None:
        """The client has left, or is not served any more since `status`: all that the session owned is freed."""
        session = self._sessions.pop(number, None)
        if session is None:
            return
        session.tenant.left()
        kind = "session closed" if status.ok else "session ended"
        self._history.record(kind, status.message or session.label, -1, number, session.tenant.name)
        self._connections.sessions.pop(number, None)
        self.leases.forget(number)
        self._slices.close(number)
        self._outbox.forget_session(number)
        self._migrations.session_closed(number)
        self._suspensions.session_closed(session)
        self._launcher.session_closed(session)
        self._tracing.session_closed(session)
        self._checks.session_closed(number)
        for host in self._resources.hosts:
            self._outbox.to_host(host, m.CloseStore(number))
        self._programs.session_closed(session)
        self._compilation.session_closed(session)
        self._recovery.session_closed(session)

    def end(self, number: int, status: Status) -> None:
        """The session has done what it may not: its proxy gets the reason, and it is closed."""
        connection = self._connections.sessions.get(number)
        self._outbox.to_session(number, m.Closing(status))
        self.close(number, status)
        if connection is not None:
            self._outbox.close(connection, f"session {number} ends: {status}")

    def tick(self, now: float) -> None:
        """Once a second: proxies learn that the controller is there, and those that are silent lose their sessions."""
        for number in self.leases.expired(now):
            text = f"nothing was heard of this session's proxy for {self.leases.seconds:.0f} s"
            self.end(number, Status(Code.UNAVAILABLE, text))
        for number, session in self._sessions.items():
            if self._connections.sessions.get(number) in self._connections.away:
                continue
            if not self.leases.has(number):
                self.leases.renew(number, now)
            session.pings += 1
            self._outbox.to_session(number, m.Ping(round(self.leases.left(number, now), 1), now))

    # ---- messages

    def handle(self, number: int, message: Any) -> None:
        """A proxy's message. One that no honest proxy sends ends its session."""
        session = self._sessions.get(number)
        if session is None:
            return
        handler = self._handlers.get(type(message))
        try:
            if handler is None:
                raise invalid(f"a proxy does not send {type(message).__name__}")
            handler(session, message)
        except StatusError as error:
            self.end(number, error.status)

    def feeds_arrived(self, host: int, message: m.FeedsArrived) -> None:
        """Feeds of a session are complete at a host: sources of functions, or what launches wait for."""
        number = message.session
        session = self._sessions.get(number)
        if session is None:
            return
        for feed in message.feeds:
            if self._compilation.source_arrived(number, host, feed):
                continue
            if session.feeds.claim_unwanted((host, feed)):
                self._outbox.to_host(host, m.DropFeed(number, feed))
            elif not self._launcher.feed_arrived(session, host, feed):
                session.feeds.early.add((host, feed))
        if len(session.feeds.early) > MAX_EARLY_FEEDS:
            text = f"this session has {MAX_EARLY_FEEDS} buffers uploaded that it does not use"
            self.end(number, Status(Code.RESOURCE_EXHAUSTED, text))
        elif session.tenant.settings.uploads and session.feeds.early:
            own = (each for each in self._sessions.values() if each.tenant is session.tenant)
            uploads = sum(len(each.feeds.early) for each in own)
            exceeded = session.tenant.exceeded("uploads", 0, uploads, f"{uploads} buffers that no launch has used yet")
            if exceeded is not None:
                self.end(number, exceeded)

    def _release(self, session: Session, message: m.Release) -> None:
        self._launcher.release(session, message.handles, message.delete)

    def _await(self, session: Session, message: m.Await) -> None:
        status = session.directory.wait(message.wait, message.handles)
        if status is not None:
            self._outbox.to_session(session.number, m.Awaited(message.wait, status))

    def _register_program(self, session: Session, message: m.RegisterProgram) -> None:
        self._programs.register(session, message.program, message.definition)

    def _register_irregular(self, session: Session, message: m.RegisterSwitch | m.RegisterLoop) -> None:
        session.irregular[message.program] = message

    def _release_program(self, session: Session, message: m.ReleaseProgram) -> None:
        self._programs.release(session, message.program)

    def _release_function(self, session: Session, message: m.ReleaseFunction) -> None:
        self._compilation.release(session, message.function)

    def _loss_acknowledged(self, session: Session, message: m.LossAcknowledged) -> None:
        topology = self._resources.topology  # some may have yet to join, in the cluster after the one that was lost
        for island in {topology.island_of(host) for host in message.hosts if 0 <= host < topology.host_count}:
            session.unseen.pop(island, None)

    def _make_error(self, session: Session, message: m.MakeError) -> None:
        session.directory.check_new(message.handles)
        session.has_errors = True
        for handle in message.handles:
            session.directory.add(handle, Entry((), 0, ready=True, error=message.status))

    def _release_slice(self, session: Session, message: m.ReleaseSlice) -> None:
        self._slice_requests.release(session, message.slice)

    def _answered(self, session: Session, message: m.Pong) -> None:
        session.pongs = min(session.pongs + 1, session.pings)
        self._tracing.proxy_answered(session.number, message, self._outbox.seconds)

    def _leaves_islands(self, session: Session, message: m.LeavesIslands) -> None:
        session.leaves_islands = True

    def _fail_on_loss(self, session: Session, message: m.FailOnLoss) -> None:
        session.waits_for_islands = False

    def _calls_recorded(self, session: Session, message: m.CallsRecorded) -> None:
        self._tracing.calls_recorded(session.number, message, self._outbox.seconds)

    def _quiesced(self, session: Session, message: m.Quiesced) -> None:
        self._migrations.quiesced(session, message.migration)
        self._suspensions.quiesced(session, message.migration)
