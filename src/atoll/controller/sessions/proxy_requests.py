"""Requests of sessions' proxies, and the data they upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from atoll.cluster.locations import DeviceLocation, HostDevice
from atoll.cluster.slice_placement import Choice, IslandDevices
from atoll.cluster.slice_requests import check
from atoll.controller.faults import NothingChangedError
from atoll.controller.sessions.sessions import Sessions
from atoll.controller.state import ClusterState
from atoll.controller.validation import PROXIES
from atoll.errors import OK, Code, Status, StatusError
from atoll.ir.validation import DefinitionCheck
from atoll.launch.compilation import Compilation
from atoll.launch.launches import Launches
from atoll.launch.registry import ProgramRegistry
from atoll.migration.migrations import Migrations
from atoll.migration.suspensions import Suspensions
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Entry
from atoll.state.buffer_states import BufferState
from atoll.state.programs import ProgramParts, calls_of
from atoll.state.session import MAX_ERROR, Session
from atoll.telemetry.trace_requests import Tracing

# Feeds that a session may have uploaded ahead of the launches that use them.
MAX_EARLY_FEEDS = 65536
# Bytes of errors that a client has made, after which the controller shortens further ones.
MAX_ERROR_BYTES = 64 << 20
Handlers = Mapping[type[Any], Callable[[Session, Any], None]]


class ProxyMessages:
    """Handles messages of proxies. `others` are the handlers of messages for only one part of the controller."""

    def __init__(
        self,
        state: ClusterState,
        *,
        sessions: Sessions,
        compilation: Compilation,
        programs: ProgramRegistry,
        launches: Launches,
        migrations: Migrations,
        suspensions: Suspensions,
        tracing: Tracing,
        others: Handlers,
    ) -> None:
        self._open = state.sessions
        self._outbox = state.outbox
        self._resources = state.resources
        self._sessions = sessions
        self._compilation = compilation
        self._releases = compilation.releases
        self._programs = programs
        self._buffers = launches.buffers
        self._feeds = launches.feeds
        self._migrations = migrations
        self._suspensions = suspensions
        self._tracing = tracing
        self._handlers: Handlers = {
            m.Release: self._release,
            m.Await: self._await,
            m.RegisterProgram: self._register_program,
            m.ProgramPart: self._program_part,
            m.ReleaseProgram: self._release_program,
            m.RegisterSwitch: self._register_control_flow,
            m.RegisterLoop: self._register_control_flow,
            m.ReleaseFunction: self._release_function,
            m.MakeError: self._make_error,
            m.Quiesced: self._quiesced,
            m.Pong: self._answered,
            m.LeavesIslands: self._leaves_islands,
            m.FailOnLoss: self._fail_on_loss,
            m.CallsRecorded: self._calls_recorded,
            **others,
        }

    def handle(self, session: Session, message: Any) -> None:
        """Handle a message of the session's proxy. A message that no correct proxy sends ends the session."""
        kind = type(message)
        validator = PROXIES.get(kind)
        if validator is not None:
            try:
                validator(session, message, self._resources.topology)
            except StatusError as error:
                self._sessions.end(session.number, error.status)
                return
            except Exception as error:  # a bug in the check
                raise NothingChangedError from error
        try:
            self._handlers[kind](session, message)
        except StatusError as error:
            self._sessions.end(session.number, error.status)

    def feeds_arrived(self, host: int, message: m.FeedsArrived) -> None:
        """Handle that feeds of a session are complete at a host: sources of functions, or buffers for launches."""
        number = message.session
        session = self._open.get(number)
        if session is None:
            return
        for feed in message.feeds:
            if self._compilation.source_arrived(number, host, feed):
                continue
            if session.feeds.claim_unwanted((host, feed)):
                self._outbox.to_host(host, m.DropFeed(number, feed))
            elif not self._feeds.arrived(session, host, feed):
                session.feeds.early.add((host, feed))
        if len(session.feeds.early) > MAX_EARLY_FEEDS:
            text = f"this session has uploaded {MAX_EARLY_FEEDS} buffers that it does not use"
            self._sessions.end(number, Status(Code.RESOURCE_EXHAUSTED, text))
        elif session.tenant.settings.uploads and session.feeds.early:
            own = (each for each in self._open.values() if each.tenant is session.tenant)
            uploads = sum(len(each.feeds.early) for each in own)
            exceeded = session.tenant.refused("uploads", 0, uploads, f"{uploads} buffers that no launch has used yet")
            if exceeded is not None:
                self._sessions.end(number, exceeded)

    def _release(self, session: Session, message: m.Release) -> None:
        self._buffers.release(session, message.handles, message.delete)

    def _await(self, session: Session, message: m.Await) -> None:
        self._buffers.wait(session, message.wait, message.handles)

    def _register_program(self, session: Session, message: m.RegisterProgram) -> None:
        before = session.parts.pop(message.program, None)
        definition, called = message.definition, calls_of(message.definition)
        if before is not None:
            definition, called = before.whole(definition), [*before.called, *called]
        self._programs.register(session, message.program, definition, called)

    def _program_part(self, session: Session, message: m.ProgramPart) -> None:
        part = message.definition
        before = session.parts.get(message.program)
        if before is None:
            check = DefinitionCheck(part.name, part.feeds, session.devices.locations)
            check.count_arguments(part.arguments)
            before = ProgramParts(part.name, part.arguments, part.feeds, check)
            session.parts[message.program] = before
        before.add(part)

    def _register_control_flow(self, session: Session, message: m.RegisterSwitch | m.RegisterLoop) -> None:
        session.control_flow[message.program] = message

    def _release_program(self, session: Session, message: m.ReleaseProgram) -> None:
        self._programs.release(session, message.program)

    def _release_function(self, session: Session, message: m.ReleaseFunction) -> None:
        self._releases.release(session, message.function)

    def _make_error(self, session: Session, message: m.MakeError) -> None:
        session.has_errors = True
        status = message.status
        session.error_bytes += len(status.message) + sum(map(len, status.payloads.values()))
        if session.error_bytes > MAX_ERROR_BYTES:
            status = Status(status.code, status.message[:MAX_ERROR])
        for handle in message.handles:
            session.directory.add(handle, Entry((), 0, BufferState.FAILED, status))

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


class SliceRequests:
    """Handles the slice requests of sessions. Each is answered at once with a slice or with what is free.

    A request for an exclusive slice may wait for the eviction of sessions with a lower priority (`evict_for` of
    `migration.memory_pressure`). `free_bytes` returns the free memory of a physical device. New slices avoid the
    islands that `overrun_islands` returns, because they may restart soon.
    """

    def __init__(
        self,
        state: ClusterState,
        free_bytes: Callable[[HostDevice], int],
        evict_for: Callable[[Session, Callable[[], Choice], Callable[[], None]], bool],
        overrun_islands: Callable[[], set[int]],
    ) -> None:
        self._overrun_islands = overrun_islands
        self._sessions = state.sessions
        self._resources = state.resources
        self._slices = state.slices
        self._outbox = state.outbox
        self._free_bytes = free_bytes
        self._evict_for = evict_for

    def add(self, session: Session, message: m.AddSlice) -> None:
        def choose() -> Choice:
            return self._slices.choose(
                session.number,
                message.slice_request,
                self._islands(session.platform),
                self._free,
                self._overrun_islands(),
            )

        try:
            check(message.slice_request)
            self._check_quota(session, message.slice_request.count)
            choice = choose()
        except StatusError as error:
            if message.slice_request.exclusive and self._evict_for(
                session, choose, partial(self._add_again, session, message)
            ):
                return
            self._outbox.to_session(session.number, m.SliceAdded(message.request, error.status))
            return
        made = self._slices.add(session.number, choice)
        hosts = tuple(
            (device, location.host) for device, location in zip(choice.devices, choice.locations, strict=True)
        )
        self._outbox.to_session(
            session.number, m.SliceAdded(message.request, OK, made.number, made.devices, made.shape, hosts)
        )

    def _add_again(self, session: Session, message: m.AddSlice) -> None:
        if self._sessions.get(session.number) is session:
            self.add(session, message)

    def _check_quota(self, session: Session, count: int) -> None:
        tenant = session.tenant
        own = (each for each in self._sessions.values() if each.tenant is tenant)
        has = sum(len(each.devices) for other in own for each in other.devices.slices.values())
        (tenant.refused("devices", count, has, f"its slices have {has}") or OK).raise_if_error()

    def release(self, session: Session, message: m.ReleaseSlice) -> None:
        if message.slice in session.devices.slices:
            self._slices.release(session.number, message.slice)

    def _islands(self, platform: str) -> list[IslandDevices]:
        islands = self._resources.islands.values()
        return [
            self._resources.devices_for(each.number, platform)
            for each in islands
            if each.was_ready and not each.is_drained
        ]

    def _free(self, location: DeviceLocation) -> int:
        return self._free_bytes((location.host, location.ordinal))
