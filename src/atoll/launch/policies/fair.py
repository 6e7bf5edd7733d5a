"""Weighted fair shares of device time, for tenants and then for the sessions of each, below strict priorities.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) on two levels. The flows are tenants, and the sessions of a
tenant. The virtual time of a flow grows by the device time of its gangs, divided by its share, and the flow with the
least virtual time is served next. A gang is charged its estimate when it is committed, and the rest when it has ended.
A flow that arrives or returns starts at the virtual time of the flows being served: idle time earns nothing, and
device time that nobody else wanted costs nothing.

This rule by itself favors flows with long gangs. Such a flow is served at the beginning of its turn, so it is ahead of
its share by half a gang on average. Therefore a new flow pays half a gang more, once. The same correction separates
Webster's method of apportionment, which is unbiased, from Adams's (Balinski and Young, 1982).
"""

from __future__ import annotations

from bisect import insort_right
from collections import deque
from operator import attrgetter
from typing import Any, Generic, TypeVar

from atoll.cluster.tenant_settings import TenantSettings
from atoll.launch.policy import Policy
from atoll.state.object_dumps import AnyRef, Deque, Dump, Ref, dump_of
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.tenants import Tenant

FlowT = TypeVar("FlowT", bound="_Flow")
# A flow counts as new if it was away for longer than this many of its gangs take in virtual time. With a smaller
# number, flows that are now and then a little behind would pay for it each time.
_AWAY_GANGS = 16
_time = attrgetter("time")


class _Flow:
    """A tenant or session that competes for device time.

    Attributes:
      time: its virtual time.
      owed: virtual time charged since then, which is added to `time` at the flow's turn.
      gang_time: virtual time that its newest gang is expected to take.
      is_new: true until a gang has ended since the flow arrived.
    """

    __slots__ = ("gang_time", "is_new", "is_waiting", "owed", "time")

    def __init__(self) -> None:
        self.time = self.owed = self.gang_time = 0.0
        self.is_waiting = False
        self.is_new = True

    def take(self) -> QueuedNode[Any] | None:
        """Return the flow's next node, or None if it has no ready one."""
        raise NotImplementedError

    @property
    def state(self) -> tuple[float, float, float, bool, bool]:
        return self.time, self.owed, self.gang_time, self.is_waiting, self.is_new

    @state.setter
    def state(self, state: tuple[float, float, float, bool, bool]) -> None:
        self.time, self.owed, self.gang_time, self.is_waiting, self.is_new = state


class _Line(Generic[FlowT]):
    """The flows that have ready nodes, by virtual time; among equals, the earliest first.

    The debt of a flow is added only when it is first in line, once for many charges. It usually moves to the end then.
    """

    __slots__ = ("now", "waiting")

    def __init__(self) -> None:
        self.now = 0.0  # the virtual time of the flow that was served last
        self.waiting: list[FlowT] = []

    def join(self, flow: FlowT) -> None:
        time = flow.time + flow.owed
        flow.owed = 0.0
        behind = self.now - time
        if behind > _AWAY_GANGS * flow.gang_time:
            time, flow.is_new = self.now, True
        elif behind > flow.gang_time:
            time = self.now - flow.gang_time
        flow.time = time
        flow.is_waiting = True
        insort_right(self.waiting, flow, key=_time)

    def remove(self, flow: FlowT) -> None:
        if flow.is_waiting:
            flow.is_waiting = False
            self.waiting.remove(flow)

    def take(self) -> QueuedNode[Any] | None:
        """Return the next node of the first flow. Flows that join later start at its virtual time."""
        waiting = self.waiting
        while waiting:
            flow = waiting[0]
            if flow.owed > 0:
                flow.time += flow.owed
                flow.owed = 0.0
                if flow.time >= waiting[-1].time:
                    waiting.append(flow)
                else:
                    insort_right(waiting, flow, 1, key=_time)
                del waiting[0]
            elif (node := flow.take()) is not None:
                if self.now < flow.time:
                    self.now = flow.time
                return node
            else:  # an empty flow leaves only at its turn, since it may get a node before that
                flow.is_waiting = False
                del waiting[0]
        return None

    def correct(self, flow: FlowT, least: float, took: float) -> None:
        """Handle that a gang of the flow took `took`. Move the flow forward in line by no less than `least`."""
        if flow.is_new and took:
            flow.is_new = False
            flow.owed += took / 2
        if flow.owed < -least and flow.is_waiting:
            self.waiting.remove(flow)
            flow.time += flow.owed
            flow.owed = 0.0
            insort_right(self.waiting, flow, key=_time)


class _Session(_Flow):
    __slots__ = ("ready", "tenant")

    def __init__(self, tenant: _Tenant) -> None:
        super().__init__()
        self.tenant = tenant
        self.ready: deque[QueuedNode[Any]] = deque()

    def take(self) -> QueuedNode[Any] | None:
        return self.ready.popleft() if self.ready else None


class _Tenant(_Flow):
    __slots__ = ("due", "line", "priority", "reserve", "sessions")

    def __init__(self, priority: int) -> None:
        super().__init__()
        self.priority = priority
        self.reserve = 0.0  # fraction of the device time that it gets while higher priorities have work
        self.due = 0.0  # nanoseconds of its reserve that it has not had
        self.sessions: dict[int, _Session] = {}
        self.line: _Line[_Session] = _Line()

    def take(self) -> QueuedNode[Any] | None:
        return self.line.take()


class FairShares(Policy):
    """Serves the tenant that is furthest behind its share, among ready tenants of the highest priority.

    A flow without competitors is in no line and is charged nothing: the only session, or the only tenant with sessions.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._sessions: dict[int, _Session] = {}
        self._only_session: _Session | None = None
        self._only_tenant: _Tenant | None = None
        self._active_tenants = 0  # tenants that have sessions
        self._lines: dict[int, _Line[_Tenant]] = {}  # by priority
        self._priorities: list[int] = []  # keys of `_lines`, the highest first
        self._reserved: dict[str, _Tenant] = {}  # tenants that have a reserve, by name

    def add(self, node: QueuedNode[Any]) -> None:
        session = self._sessions.get(node.session)
        if session is None:
            session = self._join(node)
        session.ready.append(node)
        if session is self._only_session:
            return
        if not session.is_waiting or self._only_tenant is None:
            self._wait(session)

    def take(self) -> QueuedNode[Any] | None:
        if self._only_session is not None:
            return self._only_session.take()
        if self._only_tenant is not None:
            return self._only_tenant.line.take()
        for tenant in self._reserved.values():
            if tenant.due > 0 and tenant.is_waiting:
                node = tenant.take()
                if node is not None:
                    return node
                tenant.due = 0.0  # a reserve is not saved up
        for priority in self._priorities:
            node = self._lines[priority].take()
            if node is not None:
                return node
        return None

    def discard(self, node: QueuedNode[Any]) -> None:
        session = self._sessions.get(node.session)
        if session is not None and session.ready and session.ready[0] is node:
            session.ready.popleft()

    def commit(self, gang: Gang[Any]) -> None:
        if self._only_session is None and gang.weight:
            session = self._sessions.get(gang.node.session)
            if session is not None:
                gang.charged = session.gang_time = expected = gang.estimate * gang.devices
                session.owed += expected
                if self._only_tenant is None:
                    tenant = session.tenant
                    tenant.gang_time = expected / gang.node.tenant.settings.share
                    tenant.owed += tenant.gang_time
                    if self._reserved:
                        self._note_reserves(tenant, expected)

    def charge(self, gang: Gang[Any], nanoseconds: int) -> None:
        if self._only_session is None and gang.weight:
            session = self._sessions.get(gang.node.session)
            if session is not None:
                charged = gang.charged  # 0 if the session had no competitors then
                session.owed += nanoseconds - charged
                # The session moves forward in line only if it gets back more than a gang.
                if session.is_new or session.owed < -charged:
                    session.tenant.line.correct(session, charged, nanoseconds)
                if self._only_tenant is None:
                    self._charge_tenant(session.tenant, gang, nanoseconds)

    def compiled(self, session: int, tenant: Tenant, nanoseconds: int) -> None:
        served = self._sessions.get(session)
        if served is not None and self._only_session is None:
            served.owed += nanoseconds
            if self._only_tenant is None:
                served.tenant.owed += nanoseconds / tenant.settings.share

    def _charge_tenant(self, tenant: _Tenant, gang: Gang[Any], nanoseconds: int) -> None:
        share = gang.node.tenant.settings.share
        charged = gang.charged / share
        tenant.owed += nanoseconds / share - charged
        if self._reserved:
            self._note_reserves(tenant, nanoseconds - gang.charged)
        if tenant.is_new or tenant.owed < -charged:
            self._lines[tenant.priority].correct(tenant, charged, nanoseconds / share)

    def _note_reserves(self, served: _Tenant, nanoseconds: float) -> None:
        """Note device time of a tenant. Waiting tenants of lower priorities are due their reserves of it."""
        for tenant in self._reserved.values():
            if tenant is served:
                tenant.due -= nanoseconds * (1 - tenant.reserve)
            elif not tenant.is_waiting:
                tenant.due = min(tenant.due, 0.0)  # a reserve is not saved up
            elif served.priority > tenant.priority:
                tenant.due += nanoseconds * tenant.reserve

    def _set_reserve(self, tenant: _Tenant, settings: TenantSettings) -> None:
        tenant.reserve = settings.reserve / 100
        if settings.reserve:
            self._reserved[settings.name] = tenant
        elif self._reserved:
            self._reserved.pop(settings.name, None)

    def tenant_changed(self, tenant: Tenant) -> None:
        settings, found = tenant.settings, self._tenants.get(tenant.name)
        if found is None or self._only_tenant is not None:  # it takes its settings when it joins its line
            return
        waits = found.is_waiting
        if found.priority != settings.priority:
            found = self._move(found, settings.priority)
        self._set_reserve(found, settings)
        if waits and not found.is_waiting:
            self._lines[found.priority].join(found)

    def is_like(self, other: Policy) -> bool:
        return isinstance(other, FairShares) and self._content() == other._content()

    def _content(self) -> list[object]:
        """Return a value that is equal for policies with equal state."""
        names: dict[int, object] = {id(each): name for name, each in self._tenants.items()}
        names |= {id(each): number for number, each in self._sessions.items()}
        content: list[object] = [list(self._reserved)]  # they are served in this order
        for name, tenant in self._tenants.items():
            content.append((name, tenant.priority, tenant.reserve, tenant.due, tenant.state, tenant.line.now))
            content.append((list(tenant.sessions), [names[id(each)] for each in tenant.line.waiting]))
        for number, session in self._sessions.items():
            content.append((number, session.state, list(session.ready)))
        for priority, line in self._lines.items():
            content.append((priority, line.now, [names[id(each)] for each in line.waiting]))
        return content

    def copy(self) -> FairShares:
        copy = FairShares()
        sessions: dict[int, _Session] = {}  # copies, by the identity of the original
        tenants: dict[int, _Tenant] = {}
        for name, tenant in self._tenants.items():
            other = copy._tenants[name] = tenants[id(tenant)] = _Tenant(tenant.priority)
            other.state, other.reserve, other.due = tenant.state, tenant.reserve, tenant.due
            for number, session in tenant.sessions.items():
                part = other.sessions[number] = sessions[id(session)] = _Session(other)
                part.state, part.ready = session.state, session.ready.copy()
            other.line.now, other.line.waiting = tenant.line.now, [sessions[id(each)] for each in tenant.line.waiting]
        for priority, line in self._lines.items():
            behind: _Line[_Tenant] = _Line()
            behind.now, behind.waiting = line.now, [tenants[id(each)] for each in line.waiting]
            copy._lines[priority] = behind
        copy._sessions = {number: sessions[id(session)] for number, session in self._sessions.items()}
        copy._only_session = None if self._only_session is None else sessions[id(self._only_session)]
        copy._only_tenant = None if self._only_tenant is None else tenants[id(self._only_tenant)]
        copy._active_tenants, copy._priorities = self._active_tenants, self._priorities.copy()
        copy._reserved = {name: tenants[id(tenant)] for name, tenant in self._reserved.items()}
        return copy

    def forget(self, session: int) -> None:
        ended = self._sessions.pop(session, None)
        if ended is None:
            return
        ended.tenant.line.remove(ended)
        del ended.tenant.sessions[session]
        self._active_tenants -= not ended.tenant.sessions
        self._update_only()

    def _join(self, node: QueuedNode[Any]) -> _Session:
        """Add the session of the node to its tenant."""
        tenant = self._tenant(node)
        self._active_tenants += not tenant.sessions
        session = self._sessions[node.session] = tenant.sessions[node.session] = _Session(tenant)
        self._update_only()
        return session

    def _update_only(self) -> None:
        """Update the only session and tenant after a change. A flow that has got a competitor joins its line."""
        before = self._only_session, self._only_tenant
        first = next(iter(self._sessions.values()), None)
        self._only_session = first if len(self._sessions) == 1 else None
        self._only_tenant = first.tenant if first is not None and self._active_tenants == 1 else None
        if self._only_session is not None:
            self._only_session.tenant.line.remove(self._only_session)
        if self._only_tenant is not None:
            self._lines[self._only_tenant.priority].remove(self._only_tenant)
        if before != (self._only_session, self._only_tenant):
            for session in self._sessions.values():
                if session.ready and session is not self._only_session:
                    self._wait(session)

    def _wait(self, session: _Session) -> None:
        """Add a session with a ready node to its line, and its tenant to the line of its priority."""
        tenant = session.tenant
        if not session.is_waiting:
            tenant.line.join(session)
        if self._only_tenant is None:
            priority = session.ready[-1].tenant.settings.priority
            if tenant.priority != priority:
                tenant = self._move(tenant, priority)
            if not tenant.is_waiting:
                self._set_reserve(tenant, session.ready[-1].tenant.settings)
                self._lines[priority].join(tenant)

    def _tenant(self, node: QueuedNode[Any]) -> _Tenant:
        settings = node.tenant.settings
        tenant = self._tenants.get(settings.name)
        if tenant is None:
            tenant = self._tenants[settings.name] = _Tenant(settings.priority)
            self._add_line(settings.priority)
        return tenant

    def _move(self, old: _Tenant, priority: int) -> _Tenant:
        """Move a tenant to the line of its new priority, with its sessions. It starts there as a new flow."""
        self._add_line(priority)
        self._lines[old.priority].remove(old)
        tenant = _Tenant(priority)
        tenant.sessions, tenant.line = old.sessions, old.line
        (name,) = (name for name, each in self._tenants.items() if each is old)
        self._tenants[name] = tenant
        for session in tenant.sessions.values():
            session.tenant = tenant
        return tenant

    def _add_line(self, priority: int) -> None:
        if priority not in self._lines:
            self._lines[priority] = _Line()
            self._priorities = sorted(self._lines, reverse=True)


# ---- structs: see `atoll.state.object_dumps`


@dump_of(_Line, "fair line")
class LineDump(Dump):
    now: float = 0.0
    waiting: list[AnyRef] = []


@dump_of(_Session, "fair session")
class SessionFlowDump(Dump):
    tenant: Ref[_Tenant]
    time: float = 0.0
    owed: float = 0.0
    gang_time: float = 0.0
    is_waiting: bool = False
    is_new: bool = True
    ready: Deque[Ref[QueuedNode[Any]]] = []


@dump_of(_Tenant, "fair tenant")
class TenantFlowDump(Dump):
    line: Ref[_Line[_Session]]
    priority: int = 0
    time: float = 0.0
    owed: float = 0.0
    gang_time: float = 0.0
    is_waiting: bool = False
    is_new: bool = True
    reserve: float = 0.0
    due: float = 0.0
    sessions: dict[int, Ref[_Session]] = {}


@dump_of(FairShares, "fair shares")
class FairSharesDump(Dump):
    _tenants: dict[str, Ref[_Tenant]] = {}
    _sessions: dict[int, Ref[_Session]] = {}
    _only_session: Ref[_Session] | None = None
    _only_tenant: Ref[_Tenant] | None = None
    _active_tenants: int = 0
    _lines: dict[int, Ref[_Line[_Tenant]]] = {}
    _priorities: list[int] = []
    _reserved: dict[str, Ref[_Tenant]] = {}
