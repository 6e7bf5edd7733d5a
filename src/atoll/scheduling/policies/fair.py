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

from collections import deque
from heapq import heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

from atoll.scheduling.policy import Policy
from atoll.scheduling.tickets import Gang, Ticket

Who = TypeVar("Who", bound="_Served")
# Who was away for as long as so many gangs of its own in virtual time comes anew; else those who are now and then a
# little behind would pay for it each time.
_AWAY_GANGS = 16


class _Served:
    """Somebody in a `_Line`. `time` is the virtual time; `key` that of the newest entry in the line's heap.

    `gang` is how much virtual time its last gang took; `is_new` until one has ended since it came.
    """

    __slots__ = ("gang", "is_new", "is_waiting", "key", "time")

    def __init__(self) -> None:
        self.time = self.key = self.gang = 0.0
        self.is_waiting = False
        self.is_new = True


class _Line(Generic[Who]):
    """Those who have something ready, the one with the least virtual time first; of equals, who came first."""

    __slots__ = ("_count", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0  # the virtual time of who was served last
        self._heap: list[tuple[float, int, Who]] = []
        self._count = 0

    def join(self, who: Who) -> None:
        who.is_waiting = True
        if who.time < self.now:
            if self.now - who.time > _AWAY_GANGS * who.gang:
                who.is_new = True
            who.time = self.now
        who.key = who.time
        self._count += 1
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
        if self.now < who.key:
            self.now = who.key

    def charge(self, who: Who, amount: float, least: float, took: float) -> None:
        """Negative where it was charged too much before. It moves forward in line for no less than `least`.

        `took` is how long its gang did that has ended, else 0.
        """
        if took:
            who.gang = took
            if who.is_new:
                who.is_new = False
                amount += took / 2
        if who.is_waiting:
            who.time += amount
            if who.key - who.time > least:
                self._count += 1
                who.key = who.time
                heappush(self._heap, (who.key, self._count, who))
        else:
            who.time = (who.time if who.time > self.now else self.now) + amount


class _Session(_Served):
    __slots__ = ("ready", "tenant")

    def __init__(self, tenant: _Tenant) -> None:
        super().__init__()
        self.tenant = tenant
        self.ready: deque[Ticket[Any]] = deque()


class _Tenant(_Served):
    __slots__ = ("line", "priority", "sessions")

    def __init__(self, priority: int) -> None:
        super().__init__()
        self.priority = priority
        self.sessions: dict[int, _Session] = {}
        self.line: _Line[_Session] = _Line()

    def take(self) -> Ticket[Any] | None:
        """Of the session that goes next."""
        session = self.line.first()
        if session is None:
            return None
        self.line.serve(session)
        ticket = session.ready.popleft()
        if not session.ready:
            session.is_waiting = False
        return ticket


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

    def add(self, ticket: Ticket[Any]) -> None:
        session = self._sessions.get(ticket.session)
        if session is None:
            session = self._join(ticket)
        session.ready.append(ticket)
        if session is self._alone:
            return
        tenant = session.tenant
        if tenant.priority != ticket.tenant.settings.priority:
            self._move(tenant, ticket.tenant.settings.priority)
        if not (session.is_waiting and (tenant.is_waiting or tenant is self._only)):
            self._wait(session)

    def take(self) -> Ticket[Any] | None:
        if self._alone is not None:
            ready = self._alone.ready
            return ready.popleft() if ready else None
        if self._only is not None:
            return self._only.take()
        for priority in self._priorities:
            line = self._lines[priority]
            while (tenant := line.first()) is not None:
                ticket = tenant.take()
                if ticket is not None:
                    line.serve(tenant)
                    return ticket
                tenant.is_waiting = False
        return None

    def commit(self, gang: Gang[Any]) -> None:
        if self._alone is None and gang.weight:
            expected = gang.estimate * gang.devices
            self._charge(gang, expected, expected)

    def charge(self, gang: Gang[Any], nanoseconds: int) -> None:
        if self._alone is None and gang.weight:
            expected = gang.estimate * gang.devices
            self._charge(gang, nanoseconds - expected, expected, nanoseconds)

    def _charge(self, gang: Gang[Any], amount: int, expected: int, took: int = 0) -> None:
        session = self._sessions.get(gang.ticket.session)
        if session is None:
            return
        tenant = session.tenant
        # A place in line is worth a gang: for less it stays as it is.
        tenant.line.charge(session, amount, expected, took)
        if self._only is None:
            share = gang.ticket.tenant.settings.share
            self._lines[tenant.priority].charge(tenant, amount / share, expected / share, took / share)

    def forget(self, session: int) -> None:
        ended = self._sessions.pop(session, None)
        if ended is None:
            return
        ended.is_waiting = False
        del ended.tenant.sessions[session]
        self._served -= not ended.tenant.sessions
        self._find_who_is_alone()

    def _join(self, ticket: Ticket[Any]) -> _Session:
        """The session is one of its tenant's from now on."""
        tenant = self._tenant(ticket)
        self._served += not tenant.sessions
        session = self._sessions[ticket.session] = tenant.sessions[ticket.session] = _Session(tenant)
        self._find_who_is_alone()
        return session

    def _find_who_is_alone(self) -> None:
        """A session has come or gone. Who was alone, and is not any more, stands in line from now on."""
        before = self._alone, self._only
        first = next(iter(self._sessions.values()), None)
        self._alone = first if len(self._sessions) == 1 else None
        self._only = first.tenant if first is not None and self._served == 1 else None
        if self._alone is not None:
            self._alone.is_waiting = False
        if self._only is not None:
            self._only.is_waiting = False
        if before != (self._alone, self._only):
            for session in self._sessions.values():
                if session.ready and session is not self._alone:
                    self._wait(session)

    def _wait(self, session: _Session) -> None:
        tenant = session.tenant
        if not session.is_waiting:
            tenant.line.join(session)
        if not tenant.is_waiting and self._only is None:
            self._lines[tenant.priority].join(tenant)

    def _tenant(self, ticket: Ticket[Any]) -> _Tenant:
        settings = ticket.tenant.settings
        tenant = self._tenants.get(settings.name)
        if tenant is None:
            tenant = self._tenants[settings.name] = _Tenant(settings.priority)
            self._add_line(settings.priority)
        return tenant

    def _move(self, old: _Tenant, priority: int) -> None:
        """Its priority was changed: what it has in line goes along, and it starts with those who are there."""
        self._add_line(priority)
        old.is_waiting = False
        tenant = _Tenant(priority)
        tenant.sessions, tenant.line = old.sessions, old.line
        (name,) = (name for name, each in self._tenants.items() if each is old)
        self._tenants[name] = tenant
        for session in tenant.sessions.values():
            session.tenant = tenant
        if self._only is old:
            self._only = tenant

    def _add_line(self, priority: int) -> None:
        if priority not in self._lines:
            self._lines[priority] = _Line()
            self._priorities = sorted(self._lines, reverse=True)
