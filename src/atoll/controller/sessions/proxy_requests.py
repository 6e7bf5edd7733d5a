"""What sessions' proxies ask, and what they upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.controller.faults import NothingChangedError
from atoll.controller.sessions.sessions import Sessions
from atoll.controller.state import ClusterState
from atoll.controller.validation import PROXIES
from atoll.dispatch.compilation import Compilation
from atoll.dispatch.launcher import Launcher
from atoll.dispatch.registry import ProgramRegistry
from atoll.errors import Code, Status, StatusError
from atoll.ir.validation import DefinitionCheck
from atoll.migration.migrations import Migrations
from atoll.migration.suspensions import Suspensions
from atoll.protocol import messages as m
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.program_parts import ProgramParts, calls_of
from atoll.scheduling.session import Session
from atoll.telemetry.trace_requests import Tracing

# Feeds that a session may have uploaded ahead of the launches that use them.
MAX_EARLY_FEEDS = 65536
Handlers = Mapping[type[Any], Callable[[Session, Any], None]]


class Proxies:
    """Handles their messages. `others` are the handlers of those that are for one part of the controller alone."""

    def __init__(
        self,
        state: ClusterState,
        sessions: Sessions,
        compilation: Compilation,
        programs: ProgramRegistry,
        launcher: Launcher,
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
        self._programs = programs
        self._launcher = launcher
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
        """Handle a message of the session's proxy. A message that no honest proxy sends ends the session."""
        kind = type(message)
        validator = PROXIES.get(kind)
        if validator is not None:
            try:
                validator(session, message, self._resources.topology)
            except StatusError as error:
                self._sessions.end(session.number, error.status)
                return
            except Exception as error:  # a bug of the check
                raise NothingChangedError from error
        try:
            self._handlers[kind](session, message)
        except StatusError as error:
            self._sessions.end(session.number, error.status)

    def feeds_arrived(self, host: int, message: m.FeedsArrived) -> None:
        """Feeds of a session are complete at a host: sources of functions, or what launches wait for."""
        number = message.session
        session = self._open.get(number)
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
            self._sessions.end(number, Status(Code.RESOURCE_EXHAUSTED, text))
        elif session.tenant.settings.uploads and session.feeds.early:
            own = (each for each in self._open.values() if each.tenant is session.tenant)
            uploads = sum(len(each.feeds.early) for each in own)
            exceeded = session.tenant.exceeded("uploads", 0, uploads, f"{uploads} buffers that no launch has used yet")
            if exceeded is not None:
                self._sessions.end(number, exceeded)

    def _release(self, session: Session, message: m.Release) -> None:
        self._launcher.buffers.release(session, message.handles, message.delete)

    def _await(self, session: Session, message: m.Await) -> None:
        status = session.directory.wait(message.wait, message.handles)
        if status is not None:
            self._outbox.to_session(session.number, m.Awaited(message.wait, status))

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
        self._compilation.release(session, message.function)

    def _make_error(self, session: Session, message: m.MakeError) -> None:
        session.has_errors = True
        for handle in message.handles:
            session.directory.add(handle, Entry((), 0, ready=True, error=message.status))

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
