"""Serve operators' commands: permissions, reports and tenants. `requests` handles most changes of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from atoll.cluster.array_names import check_patterns, split_name
from atoll.cluster.tenant_settings import (
    LIMIT_TEXTS,
    MAX_PRIORITY,
    MAX_RESERVE,
    MAX_SHARE,
    TenantSettings,
    limit_text,
)
from atoll.controller.faults import NothingChangedError
from atoll.controller.operators.requests import Operators
from atoll.controller.state import ClusterState
from atoll.decodable import decodable
from atoll.errors import OK, Code, SettingsError, Status, StatusError, invalid, not_found
from atoll.journal.event_log import EventLog
from atoll.launch.connections import Peer
from atoll.protocol import messages as m
from atoll.protocol.actions import AnswerUsage, End
from atoll.protocol.events import Received
from atoll.protocol.permissions import PeerKind, Scope, scope_of
from atoll.state.estimates import expectations
from atoll.state.stepped_work import TurnFailedError, Turns
from atoll.state.tenants import Tenant
from atoll.telemetry.consistency import Checks
from atoll.telemetry.report import ReportSource, report
from atoll.telemetry.trace_requests import Tracing

# Waiting requests per connection.
MAX_REQUESTS = 64
# Bytes of a report. A user's report grows with the sessions and slices of the user's tenant.
MAX_STATUS_BYTES = 48 << 20
# Requests that change nothing until their reply is sent.
_ONLY_READS = m.StatusRequest | m.DumpRequest


class OperatorService:
    """Answers each message of an operator's connection with one reply.

    A tenant that is not an operator can see and move only what belongs to it. `end_session(number, status)` ends a
    session, `store_usage()` makes the shell store the usage so far, and `stop_asked(operator, message)` handles and
    answers a request to end the cluster. `remove_arrays(tenant, name, version)` removes published arrays, and
    `tenant_changed(tenant)` applies new settings to launches that wait.
    """

    def __init__(
        self,
        controller: ReportSource,
        state: ClusterState,
        *,
        operators: Operators,
        checks: Checks,
        log: EventLog,
        tracing: Tracing,
        end_session: Callable[[int, Status], None],
        store_usage: Callable[[], None],
        stop_asked: Callable[[int, m.StopRequest], None],
        remove_arrays: Callable[[str, str, int], str],
        tenant_changed: Callable[[Tenant], None],
    ) -> None:
        self._controller = controller
        self._tenants = state.tenants
        self._outbox = state.outbox
        self._operators = operators
        self._checks = checks
        self._log = log
        self._tracing = tracing
        self._end_session = end_session
        self._store_usage = store_usage
        self._stop_asked = stop_asked
        self._remove_arrays = remove_arrays
        self._tenant_changed = tenant_changed
        self.waiting = WaitingRequests(state.connections.peers, self._serve, self._end_connection)

    def _end_connection(self, peer: Peer, reason: str) -> None:
        self._outbox.close(peer.connection, reason)

    def received(self, peer: Peer, event: Received) -> None:
        assert peer.tenant is not None
        if peer.tenant.is_operator:
            self._serve(peer, event.message)
        else:
            self.waiting.add(peer, event.message)

    def _serve(self, peer: Peer, message: Any) -> None:
        tenant = peer.tenant
        assert tenant is not None
        scope = scope_of(PeerKind.OPERATOR if tenant.is_operator else PeerKind.USER, type(message))
        try:
            self._handle(peer, message, None if scope is Scope.ALL else tenant, self._outbox.seconds)
        except StatusError as error:
            self._outbox.send(peer.connection, m.OperationReply(error.status, ""))
        except Exception as error:
            if isinstance(message, _ONLY_READS):
                raise NothingChangedError from error
            raise

    def _handle(self, peer: Peer, message: Any, viewer: Tenant | None, now: float) -> None:
        """Answer a message. The reply is restricted to what belongs to `viewer`, if given."""
        reply: Any
        match message:
            case m.StatusRequest():
                content = msgspec.json.encode(report(self._controller, viewer, now))
                if len(content) > MAX_STATUS_BYTES:
                    text = f"the report has {len(content)} bytes, and a reply at most {MAX_STATUS_BYTES}"
                    raise StatusError(Code.RESOURCE_EXHAUSTED, f"{text}: end sessions, or release slices")
                reply = m.StatusReply(content)
            case m.DumpRequest():
                reply = m.DumpReply(self._log.dump())
            case m.CheckRequest():
                self._checks.begin(peer.connection, now)
                return
            case m.TraceRequest():
                self._tracing.answer(peer.connection, message, viewer, now)
                return
            case m.RecordRequest():
                self._tracing.begin(peer.connection, message, viewer, now)
                return
            case m.UsageRequest(by=by, seconds=seconds):
                self._store_usage()
                tenant = None if viewer is None else viewer.name
                expected = expectations(self._controller.sessions.values(), viewer)
                self._outbox.add(AnswerUsage(self._outbox.cause, peer.connection, by, seconds, tenant, expected))
                return
            case m.StopRequest():
                self._controller.history.operation(OK, "the cluster ends", peer.actor)
                self._stop_asked(peer.connection, message)
                self._outbox.add(End(self._outbox.cause))
                return
            case m.SetTenant():
                reply = self._done(peer, self._set_tenant(message))
            case m.RemoveTenant(name=name):
                reply = self._done(peer, self._remove_tenant(name))
            case m.EndSessionRequest(session=number):
                self._check_owner(number, viewer)
                who = peer.tenant.name if peer.tenant is not None else ""
                self._end_session(number, Status(Code.CANCELLED, f"it was ended by the tenant {who}"))
                reply = self._done(peer, f"session {number} has ended")
            case m.RemoveArraysRequest(name=text, version=version):
                assert peer.tenant is not None
                owner, name = split_name(text, peer.tenant.name)
                if viewer is not None and owner != viewer.name:
                    raise not_found(f"{text} does not exist (atoll arrays lists the versions)")
                reply = self._done(peer, self._remove_arrays(owner, name, version))
            case _:
                if isinstance(message, m.RemapRequest | m.SuspendRequest | m.ResumeRequest):
                    self._check_owner(message.session, viewer)
                self._operators.handle(peer.connection, message)
                return
        self._outbox.send(peer.connection, reply)

    def _done(self, peer: Peer, text: str) -> m.OperationReply:
        self._controller.history.operation(OK, text, peer.actor)
        return m.OperationReply(OK, text)

    def _check_owner(self, number: int, viewer: Tenant | None) -> None:
        """Raise NOT_FOUND for another tenant's session as for none, so that users learn nothing of others."""
        session = self._controller.sessions.get(number)
        if session is None or session.is_vault or viewer not in (None, session.tenant):
            raise not_found(f"session {number} does not exist (atoll status lists them)")

    # ---- tenants

    def _set_tenant(self, message: m.SetTenant) -> str:
        if not self._tenants.are_told_apart:
            raise StatusError(
                Code.FAILED_PRECONDITION,
                "this cluster was started without tenants; start one with tenants using `atoll up --tenants FILE`",
            )
        known = self._tenants.by_name.get(message.name)
        if message.is_new or known is None:
            current = TenantSettings(message.name, message.token_hash)
        else:
            current = known.settings
        if message.share is not None and not 0 < message.share <= MAX_SHARE:
            raise invalid(
                f"the share of tenant {message.name} cannot be {message.share:g}: a share is more than 0 and at most "
                f"{MAX_SHARE:.0f}"
            )
        if message.priority is not None and abs(message.priority) > MAX_PRIORITY:
            raise invalid(
                f"the priority of tenant {message.name} cannot be {message.priority}: a priority is from "
                f"{-MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        for name, value in message.limits.items():
            if name not in LIMIT_TEXTS:
                raise invalid(f"tenants have no limit `{name[:100]}`")
            if value < 0:
                raise invalid(f"the limit `{name}` of tenant {message.name} cannot be {value}: 0 means no limit")
        if message.limits.get("reserve", 0) > MAX_RESERVE:
            raise invalid(
                f"the reserve of tenant {message.name} cannot be {message.limits['reserve']}: "
                f"a reserve is a percentage of device time, and at most {MAX_RESERVE}"
            )
        try:
            check_patterns("publish", message.publish or (), has_owner=False)
            check_patterns("subscribe", message.subscribe or (), has_owner=True)
        except SettingsError as error:
            raise invalid(f"tenant {message.name}: {error}") from None
        names = ("share", "priority", "role", "native_code", "publish", "subscribe")
        given = {name: value for name in names if (value := getattr(message, name)) is not None}
        if message.token_hash:
            given["token_hash"] = message.token_hash
        try:
            changed = msgspec.structs.asdict(current) | given | message.limits
            settings = msgspec.convert(changed, decodable(TenantSettings))
        except msgspec.ValidationError as error:
            raise invalid(f"tenant {message.name}: {error}") from None
        self._tenant_changed(self._tenants.put(settings, message.is_new))
        text = f"tenant {settings.name}: share {settings.share:g}, priority {settings.priority}, {settings.role}"
        text += "".join(f", {limit_text(limit, value)}" for limit, value in sorted(message.limits.items()))
        for name, patterns in (("publish", message.publish), ("subscribe", message.subscribe)):
            if patterns is not None:
                text += f", {name} {' '.join(patterns) or 'nothing'}"
        if message.token_hash and not message.is_new:
            text += ", new token"
        return text if message.priority is None else text + self._meaning(settings)

    def _meaning(self, settings: TenantSettings) -> str:
        """Return lines that explain the effect of a tenant's priority on other tenants."""
        others = [each for each in self._tenants.settings() if each.name != settings.name]
        lower = [each.name for each in others if each.priority < settings.priority]
        higher = [each.name for each in others if each.priority > settings.priority]
        text = ""
        if lower:
            text += (
                f"\nwarning: priorities are strict: while {settings.name} has work, these tenants get no device time "
                f"beyond their reserve (`atoll tenants set NAME --reserve PERCENT`): {', '.join(lower)}"
            )
        if higher:
            text += (
                f"\nwarning: priorities are strict: {settings.name} gets no device time beyond its reserve of "
                f"{settings.reserve} percent while one of these has work: {', '.join(higher)}"
            )
        return text

    def _remove_tenant(self, name: str) -> str:
        tenant = self._tenants.remove(name)
        ended = [session.number for session in self._controller.sessions.values() if session.tenant is tenant]
        for number in ended:
            self._end_session(number, Status(Code.CANCELLED, f"the tenant {name} was removed"))
        return f"tenant {name} was removed" + (f"; {len(ended)} of its sessions ended" if ended else "")


class WaitingRequests:
    """Requests of users' commands, by connection. Each flush of the controller answers one; operators do not wait.

    A report or a part of a trace takes a few milliseconds to make, and one read may bring a thousand requests.
    `answer(peer, message)` answers a request; `end(peer, reason)` ends a connection with too many requests.
    """

    def __init__(
        self, peers: Mapping[int, Peer], answer: Callable[[Peer, Any], None], end: Callable[[Peer, str], None]
    ) -> None:
        self._peers = peers
        self._answer = answer
        self._end = end
        self._turns: Turns[Any] = Turns()
        self.waiting = self._turns.waiting
        self.failed = self._turns.failed  # by connection

    def add(self, peer: Peer, message: Any) -> None:
        """Queue a request of the connection."""
        assert peer.tenant is not None
        number = peer.connection
        self._turns.add(number, peer.tenant.name, message)
        if len(self.waiting[number]) > MAX_REQUESTS:
            self._turns.remove(number)
            self._end(peer, f"more than {MAX_REQUESTS} requests of this command are waiting")

    def proceed(self) -> None:
        """Answer one request. Tenants take turns, and the connections of one tenant take turns."""
        number = self._turns.next()
        if number is None:
            return
        peer = self._peers.get(number)
        if peer is None:
            self._turns.remove(number)
            return
        message = self._turns.take(number)
        try:
            self._answer(peer, message)
        except NothingChangedError as error:
            self._turns.fail(number, error, message)
        except Exception as error:
            raise TurnFailedError(connection=number) from error

    def end(self, connections: Iterable[int]) -> None:
        """Drop the requests of connections that end because of a bug."""
        for number in connections:
            self._turns.remove(number)
