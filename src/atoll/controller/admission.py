"""Admission of connections and of sessions: roles, permissions, and the handling of losses.

A connection begins with a Hello. Each later message is handled if the permission table allows it for its sender
(`protocol.permissions`) and it is valid (`controller.validation`). Otherwise its sender is refused, and nothing else
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from atoll.cluster.tenant_settings import DEFAULT_NAME
from atoll.controller.faults import NothingChangedError
from atoll.controller.islands.engine_requests import Agents
from atoll.controller.islands.engine_role import EngineRole
from atoll.controller.islands.host_admission import HostAdmission
from atoll.controller.islands.island_hosts import HostMessages
from atoll.controller.islands.island_recovery import IslandRecovery
from atoll.controller.islands.relay_groups import Relays
from atoll.controller.sessions.detached_sessions import DetachedSessions
from atoll.controller.sessions.name_waits import NameWaits
from atoll.controller.sessions.sessions import Sessions
from atoll.controller.state import ClusterState
from atoll.controller.validation import ALLOWED, validate
from atoll.errors import Code, Status, StatusError
from atoll.launch.connections import Peer, PeerHandlers
from atoll.protocol import messages as m
from atoll.protocol.actions import ReportReady, SetTimer
from atoll.protocol.events import (
    ConnectionAway,
    ConnectionBack,
    ConnectionLost,
    ConnectionOpened,
    Received,
    TimerEnded,
)
from atoll.protocol.permissions import PeerKind
from atoll.protocol.permissions import check as check_permission
from atoll.quantities import counted
from atoll.security.roles import is_of_the_cluster, may_claim
from atoll.security.tokens import TOO_MANY, Guesses, Tokens
from atoll.state.session import Session
from atoll.state.tenants import Tenant

# For a connection to send its Hello, and for a worker to send its WorkerReady.
HELLO_SECONDS = 10.0
# The loss of a host's connection is handled after this time: the engine knows the cause better and usually reports it.
ENGINE_SAYS_SECONDS = 1.0


class Admission:
    """Admits peers, and handles their loss.

    `from_engine` and `from_operator` handle the messages of these peers, and `from_proxy(number, message)` those of a
    session's proxy.
    """

    def __init__(
        self,
        state: ClusterState,
        *,
        tokens: Tokens,
        version: str,
        sessions: Sessions,
        detached: DetachedSessions,
        from_proxy: Callable[[int, Any], None],
        hosts: HostMessages,
        recovery: IslandRecovery,
        relays: Relays,
        agents: Agents,
        from_engine: Callable[[Peer, Received], None],
        from_operator: Callable[[Peer, Received], None],
    ) -> None:
        self._max_sessions = state.settings.max_sessions
        self._tenants = state.tenants
        self._offenses = state.offenses
        self._connections = state.connections
        self._peers = state.connections.peers
        self._outbox = state.outbox
        self._history = state.history
        self._resources = state.resources
        self._tokens = tokens
        self._guesses = Guesses()
        self._version = version
        self._sessions = sessions
        self._detached = detached
        self._handle_proxy_message = from_proxy
        self._recovery = recovery
        self._agents = agents
        self._waiting: list[Peer] = []  # proxies that connected before the cluster was complete
        self._timers: dict[int, Callable[[], None]] = {}
        self._next_timer = 1
        self.name_waits = NameWaits(state, detached)
        self.engine_role = EngineRole(state, recovery, agents, from_engine, self._expel)
        self.hosts = HostAdmission(
            state,
            hosts,
            recovery,
            relays,
            refuse=self._refuse_with,
            expel=self._expel,
            worker_lost=self._worker_disconnected,
            relay_lost=self._relay_disconnected,
            complete=self._hosts_complete,
        )
        self._stranger = PeerHandlers("", self._hello, self._refuse_with)
        self._operator = PeerHandlers("operator", from_operator, self._answer_refused)
        self._agent = PeerHandlers("agent", agents.received, self._expel, agents.lost)
        self._waiting_proxy = PeerHandlers("waiting proxy", self._hello, self._refuse_with, self._proxy_gone)
        self._proxy = PeerHandlers("proxy", self._from_proxy, self._end_session, self._proxy_disconnected)
        self._by_name = {
            each.speaks: each
            for each in (
                self._stranger,
                self.engine_role.engine,
                self.engine_role.spare_engine,
                self._operator,
                self._agent,
                self.hosts.joining_worker,
                self.hosts.worker,
                self.hosts.relay,
                self._waiting_proxy,
                self._proxy,
            )
        }
        self._roles = {
            "worker": self.hosts.admit_worker,
            "relay": self.hosts.admit_relay,
            "proxy": self._hello_of_proxy,
            "engine": self.engine_role.admit,
            "spare engine": self.engine_role.admit_spare,
            "operator": self._hello_of_operator,
            "agent": self._hello_of_agent,
        }

    def restore_handlers(self, names: Mapping[Peer, str]) -> None:
        """Give peers the handlers with these names, `PeerHandlers.speaks`."""
        for peer, name in names.items():
            peer.handlers = self._by_name[name]

    # ---- events

    def opened(self, event: ConnectionOpened) -> None:
        peer = Peer(event.connection, event.secret, self._stranger, role=event.role, address=event.address)
        self._peers[event.connection] = peer
        self._after(HELLO_SECONDS, partial(self._expect_introduction, event.connection))

    def _expect_introduction(self, connection: int) -> None:
        peer = self._peers.get(connection)
        if peer is None:
            return
        if peer.hello is None:
            self._outbox.close(peer.connection, f"it sent no Hello within {HELLO_SECONDS:.0f} s")
        elif peer.handlers is self.hosts.joining_worker:
            who = f"the worker of host {peer.hello.host} (process {peer.hello.pid})"
            reason = f"{who} has connected, but was not ready within {HELLO_SECONDS:.0f} s"
            self._outbox.close(peer.connection, reason)
            self._recovery.never_ready(peer.hello.host, reason)

    def received(self, event: Received) -> None:
        peer = self._peers.get(event.connection)
        if peer is None:  # it was closed while the message was in transit
            return
        message, handlers = event.message, peer.handlers
        check: Callable[..., None] | None = ALLOWED[handlers.speaks].get(type(message), validate)
        if check is not None:
            try:
                if check is not validate or self._is_permitted(peer, message):
                    check(message, self._resources.topology)
            except StatusError as error:
                handlers.refuse(peer, error.status)
                return
            except Exception as error:
                raise NothingChangedError from error
        handlers.handle(peer, event)

    def _is_permitted(self, peer: Peer, message: Any) -> bool:
        """Check a message that not every peer with this role may send.

        Raises StatusError if it is forbidden. Returns False before the Hello.
        """
        if not peer.handlers.speaks:
            return False
        tenant = peer.tenant
        kind = PeerKind.OPERATOR if tenant is not None and tenant.is_operator else PeerKind.USER
        check_permission(peer.handlers.speaks, kind, type(message), "" if tenant is None else tenant.name)
        return True

    def lost(self, event: ConnectionLost) -> None:
        peer = self._connections.remove(event.connection)
        if peer is not None and peer.handlers.disconnected is not None:
            peer.handlers.disconnected(peer, event.reason)

    def away(self, event: ConnectionAway) -> None:
        """Ignore the peer's silence until it reconnects or is lost."""
        peer = self._peers.get(event.connection)
        if peer is not None:
            self._connections.away.add(event.connection)
            if peer.leases is not None:
                peer.leases.forget(peer.number)

    def back(self, event: ConnectionBack) -> None:
        peer = self._peers.get(event.connection)
        if peer is not None:
            self._connections.away.discard(event.connection)
            if peer.leases is not None:
                peer.leases.renew(peer.number, event.seconds)

    def timer_ended(self, event: TimerEnded) -> None:
        call = self._timers.pop(event.timer, None)
        if call is not None:
            call()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        number = self._next_timer
        self._next_timer += 1
        self._timers[number] = call
        self._outbox.add(SetTimer(self._outbox.cause, number, seconds))

    # ---- Hello

    def _hello(self, peer: Peer, event: Received) -> None:
        hello = event.message
        if not isinstance(hello, m.Hello):
            self._refuse(peer, Code.FAILED_PRECONDITION, "the first message must be a Hello")
            return
        if not may_claim(peer.role, hello.role):
            text = f"this process announced itself as a {hello.role}, but its certificate is that of a {peer.role}"
            self._refuse(peer, Code.PERMISSION_DENIED, text)
            return
        if not self._guesses.may_try(peer.address, event.seconds):
            self._refuse(peer, Code.UNAUTHENTICATED, TOO_MANY)
            return
        if not self._tokens.are_right(hello.role, hello.token):
            self._guesses.wrong(peer.address, event.seconds)
            whose = "your tenant's" if self._tenants.are_told_apart else "the cluster's"
            text = f"this cluster asks for a token: set ATOLL_TOKEN to {whose}"
            if self._tokens.host and is_of_the_cluster(hello.role):
                text = f"a {hello.role} needs the token of this cluster's hosts, which clients do not have"
            self._refuse(peer, Code.UNAUTHENTICATED, text)
            return
        if hello.protocol != m.PROTOCOL:
            self._refuse(
                peer,
                Code.FAILED_PRECONDITION,
                f"the controller (atoll {self._version}) speaks protocol {m.PROTOCOL}, the {hello.role} "
                f"(atoll {hello.version}) speaks {hello.protocol}: install the same version of atoll on both",
            )
            return
        peer.hello = hello
        if not is_of_the_cluster(hello.role):
            peer.tenant = self._tenants.by_name[self._tokens.tenant_of(hello.token) or DEFAULT_NAME]
            problem = self._offenses.client_problem(peer.tenant, event.seconds)
            if problem is not None:
                self._refuse_with(peer, problem)
                return
        admit = self._roles.get(hello.role)
        if admit is None:
            text = f"unknown role {hello.role!r}: expected {', '.join(self._roles)}"
            self._refuse(peer, Code.FAILED_PRECONDITION, text)
            return
        try:
            admit(peer, hello)
        except StatusError as error:
            self._refuse_with(peer, error.status)

    def _hello_of_operator(self, peer: Peer, hello: m.Hello) -> None:
        peer.handlers = self._operator

    def _hello_of_agent(self, peer: Peer, hello: m.Hello) -> None:
        self._outbox.name(peer.connection, f"the host agent on {hello.label}")
        peer.handlers = self._agent
        self._agents.admit(peer)

    def _hello_of_proxy(self, peer: Peer, hello: m.Hello) -> None:
        self._outbox.name(peer.connection, f"the proxy of {hello.label or hello.pid}")
        assert peer.tenant is not None
        try:
            hello.run.check()
        except StatusError as error:
            self._refuse_session(peer, error.status)
            return
        # Before the quotas: the session that has the name is often the one that has reached them.
        if self._detached.holder(peer.tenant, hello.run.name) is not None:
            self._wait_for_name(peer)
            return
        exceeded = self._exceeded(peer.tenant)
        if exceeded is not None:
            self._refuse_session(peer, exceeded)
            return
        peer.handlers = self._waiting_proxy
        if self._resources.is_complete:
            self._open_session(peer)
        else:
            self._waiting.append(peer)

    def _exceeded(self, tenant: Tenant) -> Status | None:
        """Count a session of the tenant, or return the reason why it may not open one."""
        if len(self._connections.sessions) + len(self._waiting) >= self._max_sessions:
            text = f"the cluster is full: it has {counted(self._max_sessions, 'session')} (atoll status lists them)"
            return Status(Code.RESOURCE_EXHAUSTED, text)
        exceeded = tenant.admit()
        return None if exceeded is None else Status(Code.RESOURCE_EXHAUSTED, exceeded.message)

    def _proxy_gone(self, peer: Peer, reason: str = "") -> None:
        """Handle that a proxy no longer waits for its session."""
        if self.name_waits.remove(peer):
            return
        if peer in self._waiting:
            self._waiting.remove(peer)
        assert peer.tenant is not None
        peer.tenant.left()

    def _refuse(self, peer: Peer, code: Code, text: str) -> None:
        self._outbox.send(peer.connection, m.Refused(Status(code, text)))
        is_stranger = peer.hello is None
        if peer.handlers is self._waiting_proxy:
            self._proxy_gone(peer)
        self._outbox.close(peer.connection, text if is_stranger else "")

    def _refuse_session(self, peer: Peer, status: Status) -> None:
        """Refuse a session to a proxy that may have one at another time."""
        assert peer.hello is not None
        assert peer.tenant is not None
        label = peer.hello.label or f"process {peer.hello.pid}"
        self._history.record("session refused", f"{label}: {status.message}", tenant=peer.tenant.name)
        self._refuse_with(peer, status)

    def _refuse_with(self, peer: Peer, status: Status) -> None:
        """Refuse a peer that has not been admitted yet."""
        self._refuse(peer, Code(status.code), status.message)

    def _expel(self, peer: Peer, status: Status) -> None:
        """Close the connection of a peer that has sent a forbidden or an invalid message."""
        assert peer.hello is not None
        self._outbox.close(
            peer.connection, f"the {peer.hello.role} of process {peer.hello.pid} was disconnected: {status}"
        )
        if peer.handlers.disconnected is not None:
            peer.handlers.disconnected(peer, str(status))

    def _answer_refused(self, peer: Peer, status: Status) -> None:
        self._outbox.send(peer.connection, m.OperationReply(status, ""))

    # ---- sessions

    def _wait_for_name(self, peer: Peer) -> None:
        try:
            self.name_waits.add(peer)
        except StatusError as error:
            self._refuse_session(peer, error.status)
        else:
            peer.handlers = self._waiting_proxy

    def open_named_sessions(self) -> None:
        """Open sessions whose names have become free, in the order of their requests."""
        if not self.name_waits or not self._resources.is_complete:
            return
        for peer in self.name_waits.with_free_names():
            assert peer.tenant is not None
            exceeded = self._exceeded(peer.tenant)
            if exceeded is not None:
                self._refuse_session(peer, exceeded)
            else:
                self.name_waits.remove(peer)
                self._open_session(peer)

    def refuse_late(self, now: float) -> None:
        """Refuse the proxies that have waited for a name for too long, and tell others why they wait.

        Called once per second.
        """
        for peer, status in self.name_waits.late(now):
            self._refuse_session(peer, status)
        self.name_waits.tell(now)

    def _open_or_wait(self, peer: Peer) -> None:
        """Open a session now that the cluster is complete, unless one that also waited for this has its name."""
        assert peer.hello is not None
        assert peer.tenant is not None
        if self._detached.holder(peer.tenant, peer.hello.run.name) is None:
            self._open_session(peer)
        else:
            peer.tenant.left()
            peer.handlers = self._stranger
            self._wait_for_name(peer)

    def _open_session(self, peer: Peer) -> None:
        assert peer.hello is not None
        assert peer.tenant is not None
        try:
            session = self._sessions.open(
                peer.connection,
                peer.secret,
                peer.hello.pid,
                peer.hello.label,
                peer.tenant,
                peer.hello.platform,
                peer.hello.run,
            )
        except StatusError as error:
            self._refuse_session(peer, error.status)
            return
        peer.number = session.number
        peer.handlers, peer.leases = self._proxy, self._sessions.leases

    def admit_again(self, session: Session, connection: int, address: str) -> None:
        """Admit the proxy of a persisted session, which has yet to reconnect from `address`."""
        hello = m.Hello(
            m.PROTOCOL, "proxy", "", session.pid, self._version, session.label, resumes=True, run=session.run
        )
        peer = Peer(
            connection,
            session.secret,
            self._proxy,
            hello,
            session.number,
            address=address,
            tenant=session.tenant,
            leases=self._sessions.leases,
        )
        self._peers[connection] = peer
        self._outbox.name(peer.connection, f"the proxy of {hello.label or hello.pid}")

    def _from_proxy(self, peer: Peer, event: Received) -> None:
        self._sessions.leases.renew(peer.number, event.seconds)
        self._handle_proxy_message(peer.number, event.message)

    def _end_session(self, peer: Peer, status: Status) -> None:
        self._sessions.end(peer.number, status)

    def _proxy_disconnected(self, peer: Peer, reason: str) -> None:
        self._detached.client_left(peer.number)

    # ---- hosts

    def _hosts_complete(self) -> None:
        """Open the sessions that waited for the last host."""
        waiting, self._waiting = self._waiting, []
        for proxy in waiting:
            self._open_or_wait(proxy)
        self._outbox.add(ReportReady(self._outbox.cause))

    def _worker_disconnected(self, peer: Peer, reason: str) -> None:
        self._after(ENGINE_SAYS_SECONDS, partial(self._fail_absent_worker, peer.number, reason))

    def _relay_disconnected(self, peer: Peer, reason: str) -> None:
        self._after(ENGINE_SAYS_SECONDS, partial(self._fail_without_relay, peer.connection, reason))

    # These are stored as callbacks of timers, and timers belong to this class.

    def _fail_absent_worker(self, host: int, reason: str) -> None:
        self.hosts.fail_absent_worker(host, reason)

    def _fail_without_relay(self, connection: int, reason: str) -> None:
        self.hosts.fail_without_relay(connection, reason)
