"""The order in which a host compiles for its tenants. Pure: the caller passes the time.

Each tenant has a queue. A free place goes to the tenant that has used the least compile time relative to its share, as
with devices. Spare places keep a tenant's long compilations from delaying others: only a tenant that is not compiling
gets one. A compilation that waits for its client's answer occupies no place.
"""

from __future__ import annotations

import enum
from collections import deque

import msgspec

from atoll.errors import Code, StatusError

PLACES = 2
MAX_PLACES = 8  # including the spare ones
# Compilations of one tenant, and of one session, that may wait for their client at a time. A callback may compile a
# program that asks its client as well.
MAX_ASKING, MAX_ASKING_PER_SESSION = 16, 4
MAX_QUEUED = 16_384  # per tenant


class State(enum.Enum):
    """State of a compilation: QUEUED -> RUNNING, then RUNNING <-> ASKING. It is removed at its end or cancellation."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    ASKING = enum.auto()


class _Compilation(msgspec.Struct):
    tenant: _Tenant
    session: int
    may_ask: bool
    state: State = State.QUEUED
    since: float = 0.0  # when it got its current place
    seconds: float = 0.0  # for which it had earlier places


class _Tenant(msgspec.Struct):
    name: str
    share: float
    used: float = 0.0  # seconds of places per share
    queue: deque[int] = msgspec.field(default_factory=deque)
    started: set[int] = msgspec.field(default_factory=set)


class CompileQueue:
    """Compilations by number. Call `start` after each change."""

    def __init__(self, places: int = PLACES, max_places: int = MAX_PLACES) -> None:
        self._places = places
        self._max_places = max_places
        self._compilations: dict[int, _Compilation] = {}
        self._tenants: dict[str, _Tenant] = {}  # cleared when there is no compilation

    def add(self, number: int, tenant: str, share: float, session: int, may_ask: bool = False) -> None:
        """Add a compilation to its tenant's queue. `may_ask` states whether it asks its client while it runs.

        Raise RESOURCE_EXHAUSTED if the queue is full.
        """
        record = self._tenants.get(tenant)
        if record is None or not (record.queue or record.started):
            # A tenant earns no credit while it compiles nothing.
            least = min((each.used for each in self._tenants.values() if each.queue or each.started), default=0.0)
            record = self._tenants.setdefault(tenant, _Tenant(tenant, share))
            record.used = max(record.used, least)
        if len(record.queue) >= MAX_QUEUED:
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"{MAX_QUEUED} programs of tenant {tenant} wait to be compiled")
        record.share = share
        record.queue.append(number)
        self._compilations[number] = _Compilation(record, session, may_ask)

    def start(self, now: float) -> list[int]:
        """Start the compilations that get a place, and return their numbers."""
        started = []
        while (number := self._next(now)) is not None:
            each = self._compilations[number]
            each.tenant.queue.remove(number)
            each.tenant.started.add(number)
            each.state, each.since = State.RUNNING, now
            started.append(number)
        return started

    def ask(self, number: int, now: float) -> None:
        """Free the place of a compilation that waits for its client."""
        each = self._compilations.get(number)
        if each is not None and each.state is State.RUNNING:
            self._charge(each, now)
            each.state = State.ASKING

    def answered(self, number: int, now: float) -> None:
        """Continue a compilation, without waiting for a place, because it holds memory and a process."""
        each = self._compilations.get(number)
        if each is not None and each.state is State.ASKING:
            each.state, each.since = State.RUNNING, now

    def end(self, number: int, now: float) -> float:
        """Remove a compilation in any state. Return the seconds for which it had a place, or 0 if it is unknown."""
        each = self._compilations.pop(number, None)
        if each is None:
            return 0.0
        self._charge(each, now)
        tenant = each.tenant
        tenant.started.discard(number)
        if each.state is State.QUEUED:
            tenant.queue.remove(number)
        if not self._compilations:
            self._tenants.clear()
        return each.seconds

    def state(self, number: int) -> State | None:
        """Return the state of a compilation; None if it has ended."""
        each = self._compilations.get(number)
        return None if each is None else each.state

    def statistics(self) -> dict[str, int]:
        """Return the number of compilations per state."""
        counts = dict.fromkeys((state.name.lower() for state in State), 0)
        for each in self._compilations.values():
            counts[each.state.name.lower()] += 1
        return counts

    def _charge(self, each: _Compilation, now: float) -> None:
        if each.state is State.RUNNING:
            each.seconds += now - each.since
            each.tenant.used += (now - each.since) / each.tenant.share
            each.since = now

    def _next(self, now: float) -> int | None:
        """Return the compilation that gets the next place, or None if no place is free for any."""
        running = {tenant.name: self._running(tenant) for tenant in self._tenants.values()}
        count = sum(map(len, running.values()))
        if count >= self._max_places:
            return None
        best: tuple[float, int, int] | None = None
        for tenant in self._tenants.values():
            own = running[tenant.name]
            if count >= self._places and own:
                continue
            number = self._first(tenant)
            if number is not None:
                used = tenant.used + sum(now - each.since for each in own) / tenant.share
                best = min(best or (used, len(own), number), (used, len(own), number))
        return None if best is None else best[2]

    def _running(self, tenant: _Tenant) -> list[_Compilation]:
        started = (self._compilations[number] for number in tenant.started)
        return [each for each in started if each.state is State.RUNNING]

    def _first(self, tenant: _Tenant) -> int | None:
        """Return the first compilation of the tenant's queue that may start, within the bounds on asking ones."""
        asking = [self._compilations[number].session for number in tenant.started if self._compilations[number].may_ask]
        for number in tenant.queue:
            each = self._compilations[number]
            if not each.may_ask:
                return number
            if len(asking) < MAX_ASKING and asking.count(each.session) < MAX_ASKING_PER_SESSION:
                return number
        return None
