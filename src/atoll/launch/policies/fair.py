"""Weighted fair shares of device time, tenants first and then the sessions of each, below strict priorities.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) on two levels. Who is served has a virtual time that grows by the
device time of its gangs, divided by its share; who has the least goes next. A gang is charged what it is expected to
take when it is committed, and the rest when it has ended. Who comes, or comes back, starts where those are who are
being served: nobody saves up for having been idle, and nobody owes for what was free.

Of itself that favours long gangs: who has them is served at the beginning of its turn, and is ahead of its share by
half a gang on average. So who comes pays half a gang more, once. That is what tells the methods of Webster and of Adams
apart where seats of a parliament are given by votes (Balinski and Young, 1982): the first favours nobody.
"""

from __future__ import annotations

from bisect import insort_right
from collections import deque
from operator import attrgetter
from typing import Any, Generic, TypeVar

from atoll.cluster.tenant_settings import TenantSettings
from atoll.launch.policy import Policy
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.tenants import Tenant

Who = TypeVar("Who", bound="_Served")
# Who was away for as long as so many gangs of its own in virtual time comes anew; else those who are now and then a
# little behind would pay for it each time.
_AWAY_GANGS = 16
_time = attrgetter("time")


class _Served:
    """Somebody in a `_Line`: `time` is its virtual time, to which what it has `owed` since is added at its turn.

    `gang` is how much virtual time its newest gang is expected to take; `is_new` until one has ended since it came.
    """

    __slots__ = ("gang", "is_new", "is_waiting", "owed", "time")

    def __init__(self) -> None:
        self.time = self.owed = self.gang = 0.0
        self.is_waiting = False
        self.is_new = True

    def take(self) -> QueuedNode[Any] | None:
        """What it wants to run next; None where it has nothing."""
        raise NotImplementedError


class _Line(Generic[Who]):
    """Those who have something ready, the one with the least virtual time first; of equals, who came first.

    What somebody owes is looked at when its turn has come: once for many charges. It mostly goes to the end then.
    """

    __slots__ = ("now", "waiting")

    def __init__(self) -> None:
        self.now = 0.0  # the virtual time of who was served last
        self.waiting: list[Who] = []

    def join(self, who: Who) -> None:
        time = who.time + who.owed
        who.owed = 0.0
        behind = self.now - time
        if behind > _AWAY_GANGS * who.gang:
            time, who.is_new = self.now, True
        elif behind > who.gang:
            time = self.now - who.gang
        who.time = time
        who.is_waiting = True
        insort_right(self.waiting, who, key=_time)

    def remove(self, who: Who) -> None:
        if who.is_waiting:
            who.is_waiting = False
            self.waiting.remove(who)

    def take(self) -> QueuedNode[Any] | None:
        """Of who goes next. Who joins from now on starts where that one is."""
        waiting = self.waiting
        while waiting:
            who = waiting[0]
            if who.owed > 0:
                who.time += who.owed
                who.owed = 0.0
                if who.time >= waiting[-1].time:
                    waiting.append(who)
                else:
                    insort_right(waiting, who, 1, key=_time)
                del waiting[0]
            elif (node := who.take()) is not None:
                if self.now < who.time:
                    self.now = who.time
                return node
            else:  # it leaves only now: until its turn has come it may have something again
                who.is_waiting = False
                del waiting[0]
        return None

    def correct(self, who: Who, least: float, took: float) -> None:
        """A gang of its has ended, which took so much. It moves forward in line for no less than `least`."""
        if who.is_new and took:
            who.is_new = False
            who.owed += took / 2
        if who.owed < -least and who.is_waiting:
            self.waiting.remove(who)
            who.time += who.owed
            who.owed = 0.0
            insort_right(self.waiting, who, key=_time)


class _Session(_Served):
    __slots__ = ("ready", "tenant")

    def __init__(self, tenant: _Tenant) -> None:
        super().__init__()
        self.tenant = tenant
        self.ready: deque[QueuedNode[Any]] = deque()

    def take(self) -> QueuedNode[Any] | None:
        return self.ready.popleft() if self.ready else None


class _Tenant(_Served):
    __slots__ = ("due", "line", "priority", "reserve", "sessions")

    def __init__(self, priority: int) -> None:
        super().__init__()
        self.priority = priority
        self.reserve = 0.0  # part of the device time that it gets while higher priorities have work
        self.due = 0.0  # device time that it should have had of that, and has not
        self.sessions: dict[int, _Session] = {}
        self.line: _Line[_Session] = _Line()

    def take(self) -> QueuedNode[Any] | None:
        return self.line.take()


class FairShares(Policy):
    """Of the tenants of the highest priority that have something ready, the one that is furthest behind its share.

    Who has nobody to share with stands in no line and is charged nothing: a session that is alone, and a tenant whose
    sessions are all there are.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._sessions: dict[int, _Session] = {}
        self._alone: _Session | None = None
        self._only: _Tenant | None = None
        self._served = 0  # tenants that have sessions
        self._lines: dict[int, _Line[_Tenant]] = {}  # by priority
        self._priorities: list[int] = []  # of these, the highest first
        self._reserved: dict[str, _Tenant] = {}  # that have a reserve

    def add(self, node: QueuedNode[Any]) -> None:
        session = self._sessions.get(node.session)
        if session is None:
            session = self._join(node)
        session.ready.append(node)
        if session is self._alone:
            return
        if not session.is_waiting or self._only is None:
            self._wait(session)

    def take(self) -> QueuedNode[Any] | None:
        if self._alone is not None:
            return self._alone.take()
        if self._only is not None:
            return self._only.line.take()
        for tenant in self._reserved.values():
            if tenant.due > 0 and tenant.is_waiting:
                node = tenant.take()
                if node is not None:
                    return node
                tenant.due = 0.0  # it has nothing, and saves nothing up
        for priority in self._priorities:
            node = self._lines[priority].take()
            if node is not None:
                return node
        return None

    def commit(self, gang: Gang[Any]) -> None:
        if self._alone is None and gang.weight:
            session = self._sessions.get(gang.node.session)
            if session is not None:
                gang.charged = session.gang = expected = gang.estimate * gang.devices
                session.owed += expected
                if self._only is None:
                    tenant = session.tenant
                    tenant.gang = expected / gang.node.tenant.settings.share
                    tenant.owed += tenant.gang
                    if self._reserved:
                        self._note_reserves(tenant, expected)

    def charge(self, gang: Gang[Any], nanoseconds: int) -> None:
        if self._alone is None and gang.weight:
            session = self._sessions.get(gang.node.session)
            if session is not None:
                charged = gang.charged  # nothing, where it was alone then: of what runs on, a newcomer has its share
                session.owed += nanoseconds - charged
                # A place in line is worth a gang: for less it stays as it is.
                if session.is_new or session.owed < -charged:
                    session.tenant.line.correct(session, charged, nanoseconds)
                if self._only is None:
                    self._charge_tenant(session.tenant, gang, nanoseconds)

    def compiled(self, session: int, tenant: Tenant, nanoseconds: int) -> None:
        served = self._sessions.get(session)
        if served is not None and self._alone is None:
            served.owed += nanoseconds
            if self._only is None:
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
        """Note that a tenant has had device time: tenants of lower priorities that wait are due a part of it."""
        for tenant in self._reserved.values():
            if tenant is served:
                tenant.due -= nanoseconds * (1 - tenant.reserve)
            elif not tenant.is_waiting:
                tenant.due = min(tenant.due, 0.0)  # nothing is saved up
            elif served.priority > tenant.priority:
                tenant.due += nanoseconds * tenant.reserve

    def _set_reserve(self, tenant: _Tenant, settings: TenantSettings) -> None:
        tenant.reserve = settings.reserve / 100
        if settings.reserve:
            self._reserved[settings.name] = tenant
        elif self._reserved:
            self._reserved.pop(settings.name, None)

    def forget(self, session: int) -> None:
        ended = self._sessions.pop(session, None)
        if ended is None:
            return
        ended.tenant.line.remove(ended)
        del ended.tenant.sessions[session]
        self._served -= not ended.tenant.sessions
        self._find_who_is_alone()

    def _join(self, node: QueuedNode[Any]) -> _Session:
        """The session is one of its tenant's from now on."""
        tenant = self._tenant(node)
        self._served += not tenant.sessions
        session = self._sessions[node.session] = tenant.sessions[node.session] = _Session(tenant)
        self._find_who_is_alone()
        return session

    def _find_who_is_alone(self) -> None:
        """A session has come or gone. Who was alone, and is not any more, stands in line from now on."""
        before = self._alone, self._only
        first = next(iter(self._sessions.values()), None)
        self._alone = first if len(self._sessions) == 1 else None
        self._only = first.tenant if first is not None and self._served == 1 else None
        if self._alone is not None:
            self._alone.tenant.line.remove(self._alone)
        if self._only is not None:
            self._lines[self._only.priority].remove(self._only)
        if before != (self._alone, self._only):
            for session in self._sessions.values():
                if session.ready and session is not self._alone:
                    self._wait(session)

    def _wait(self, session: _Session) -> None:
        """It has something ready: it is in line, and its tenant in that of its priority."""
        tenant = session.tenant
        if not session.is_waiting:
            tenant.line.join(session)
        if self._only is None:
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
        """Its priority was changed: what it has in line goes along, and it starts with those who are there."""
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
