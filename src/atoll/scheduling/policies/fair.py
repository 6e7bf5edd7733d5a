"""Weighted fair shares of device time, tenants first and then the sessions of each, below strict priorities.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) on two levels. Who is served has a virtual time that grows by the
device time of its gangs, divided by its share; who has the least goes next. A gang is charged what it is expected to
take when it is committed, and the rest when it has ended. Who comes, or comes back, starts where those are who are
being served: nobody saves up for having been idle, and nobody owes for what was free.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

from atoll.scheduling.policy import Policy
from atoll.scheduling.tickets import Gang, Ticket

Who = TypeVar("Who", bound="_Served")


class _Served:
    """Somebody in a `_Line`. `time` is the virtual time; `key` that of the newest entry in the line's heap."""

    __slots__ = ("is_waiting", "key", "time")

    def __init__(self) -> None:
        self.time = self.key = 0.0
        self.is_waiting = False


class _Line(Generic[Who]):
    """Those who have something ready, the one with the least virtual time first; of equals, who came first."""

    __slots__ = ("_count", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0  # the virtual time of who was served last
        self._heap: list[tuple[float, int, Who]] = []
        self._count = 0

    def join(self, who: Who) -> None:
        who.is_waiting = True
        who.time = max(who.time, self.now)
        self._push(who)

    def _push(self, who: Who) -> None:
        self._count += 1
        who.key = who.time
        heappush(self._heap, (who.key, self._count, who))

    def first(self) -> Who | None:
        """Who goes next."""
        heap = self._heap
        while heap:
            key, _, who = heap[0]
            if not who.is_waiting or key != who.key:
                heappop(heap)  # it left the line, or has a newer entry
            elif key < who.time:  # it was charged since
                self._count += 1
                who.key = who.time
                heapreplace(heap, (who.key, self._count, who))
            else:
                return who
        return None

    def serve(self, who: Who) -> None:
        """It is served now: who joins starts here."""
        self.now = max(self.now, who.key)

    def charge(self, who: Who, amount: float) -> None:
        """Negative where it was charged too much before."""
        if not who.is_waiting:
            who.time = max(who.time, self.now)
        who.time += amount
        if who.is_waiting and who.time < who.key:
            self._push(who)


class _Session(_Served):
    __slots__ = ("ready",)

    def __init__(self) -> None:
        super().__init__()
        self.ready: deque[Ticket[Any]] = deque()


class _Tenant(_Served):
    __slots__ = ("line", "priority", "sessions")

    def __init__(self, priority: int) -> None:
        super().__init__()
        self.priority = priority
        self.sessions: dict[int, _Session] = {}
        self.line: _Line[_Session] = _Line()


class FairShares(Policy):
    """Of the tenants of the highest priority that have something ready, the one that is furthest behind its share."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._alone: _Session | None = None  # with nobody to share with, it stands in no line and is charged nothing
        self._lines: dict[int, _Line[_Tenant]] = {}  # by priority
        self._priorities: list[int] = []  # of these, the highest first
        self._of_session: dict[int, _Tenant] = {}

    def add(self, ticket: Ticket[Any]) -> None:
        tenant = self._of_session.get(ticket.session)
        if tenant is None:
            tenant = self._tenant(ticket)
            self._join(tenant, ticket.session)
        session = tenant.sessions[ticket.session]
        session.ready.append(ticket)
        if session is self._alone:
            return
        if tenant.priority != ticket.tenant.settings.priority:
            tenant = self._move(tenant, ticket.tenant.settings.priority)
        self._wait(tenant, session)

    def take(self) -> Ticket[Any] | None:
        if self._alone is not None:
            ready = self._alone.ready
            return ready.popleft() if ready else None
        for priority in self._priorities:
            line = self._lines[priority]
            while (tenant := line.first()) is not None:
                session = tenant.line.first()
                if session is None:  # it has ended
                    tenant.is_waiting = False
                    continue
                line.serve(tenant)
                tenant.line.serve(session)
                ticket = session.ready.popleft()
                if not session.ready:
                    session.is_waiting = False
                    tenant.is_waiting = tenant.line.first() is not None
                if not (ticket.committed or ticket.dropped):
                    return ticket
        return None

    def commit(self, gang: Gang[Any]) -> None:
        self._charge(gang, gang.estimate * gang.devices)

    def charge(self, gang: Gang[Any], nanoseconds: int) -> None:
        self._charge(gang, nanoseconds - gang.estimate * gang.devices)

    def forget(self, session: int) -> None:
        tenant = self._of_session.pop(session, None)
        if tenant is None:
            return
        ended = tenant.sessions.pop(session)
        ended.is_waiting = False
        if ended is self._alone:
            self._alone = None
        if len(self._of_session) == 1:
            ((number, tenant),) = self._of_session.items()
            self._alone = tenant.sessions[number]
            self._alone.is_waiting = tenant.is_waiting = False

    def _charge(self, gang: Gang[Any], nanoseconds: int) -> None:
        if self._alone is not None or not gang.weight:
            return
        session = gang.ticket.session
        tenant = self._of_session.get(session)
        if tenant is not None:
            tenant.line.charge(tenant.sessions[session], nanoseconds)
            self._lines[tenant.priority].charge(tenant, nanoseconds / gang.ticket.tenant.settings.share)

    def _join(self, tenant: _Tenant, number: int) -> None:
        """The session is one of the tenant's from now on."""
        session = tenant.sessions[number] = _Session()
        self._of_session[number] = tenant
        alone, self._alone = self._alone, session if len(self._of_session) == 1 else None
        if alone is not None and alone.ready:
            self._wait(next(each for each in self._tenants.values() if alone in each.sessions.values()), alone)

    def _wait(self, tenant: _Tenant, session: _Session) -> None:
        if not session.is_waiting:
            tenant.line.join(session)
        if not tenant.is_waiting:
            self._lines[tenant.priority].join(tenant)

    def _tenant(self, ticket: Ticket[Any]) -> _Tenant:
        settings = ticket.tenant.settings
        tenant = self._tenants.get(settings.name)
        if tenant is None:
            tenant = self._tenants[settings.name] = _Tenant(settings.priority)
            self._add_line(settings.priority)
        return tenant

    def _move(self, old: _Tenant, priority: int) -> _Tenant:
        """Its priority was changed: what it has in line goes along, and it starts with those who are there."""
        self._add_line(priority)
        old.is_waiting = False
        tenant = _Tenant(priority)
        tenant.sessions, tenant.line = old.sessions, old.line
        (name,) = (name for name, each in self._tenants.items() if each is old)
        self._tenants[name] = tenant
        self._of_session.update(dict.fromkeys(tenant.sessions, tenant))
        return tenant

    def _add_line(self, priority: int) -> None:
        if priority not in self._lines:
            self._lines[priority] = _Line()
            self._priorities = sorted(self._lines, reverse=True)
