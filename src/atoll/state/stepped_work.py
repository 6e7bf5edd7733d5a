"""Work that the controller does in steps, some of them per flush, so that it serves other sessions in between.

Sessions take turns, by tenant first: a tenant with nine sessions has as many turns as a tenant with one.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Generic, NamedTuple, TypeVar

from atoll.cluster.processes.bugs import described
from atoll.state.session import Session

# At most this many items of a collection are released at once.
SMALL_ITEMS = 64
# Characters of a bug's traceback.
_MAX_TRACE = 16_384
# Discarded items per step of a flush.
_DISCARDED_PER_STEP = 8

_Item = TypeVar("_Item")


def taken(left: list[int], count: int) -> list[int]:
    """Remove and return at most `count` numbers, the last one first."""
    some, left[-count:] = left[: -count - 1 : -1], ()
    return some


class TurnFailedError(Exception):
    """A bug occurred in the turn of a session or of a command's connection. `__cause__` is the original exception."""

    def __init__(self, *, session: int = 0, connection: int = 0) -> None:
        super().__init__(session, connection)
        self.sessions = (session,) if session else ()
        self.connections = (connection,) if connection else ()


class Bug(NamedTuple):
    """A bug that occurred in the turn of a session or of a command's connection, before any state had changed.

    The session or connection has no turn until the controller's process has ended it, with the event `Skipped`. The bug
    is part of the state, so that the next process ends it if this one cannot.
    """

    reason: str  # for users
    trace: str  # for the log

    @classmethod
    def of(cls, error: BaseException, message: Any = None) -> Bug:
        cause = error.__cause__ or error
        name = "" if message is None else f"{type(message).__name__}: "
        return cls(f"{name}{described(cause)}", "".join(traceback.format_exception(cause))[-_MAX_TRACE:])


class Turns(Generic[_Item]):
    """Items of work, queued per session. The first session of the first tenant has the next turn.

    `waiting` maps each session that has items to these items. `failed` has the sessions that have no turn because of a
    bug. Callers do not add or remove sessions in either of them.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, deque[_Item]] = {}
        self.failed: dict[int, Bug] = {}
        self._sessions: dict[str, dict[int, None]] = {}
        self._tenants: dict[int, str] = {}

    def add(self, session: int, tenant: str, item: _Item) -> None:
        """Append an item to the queue of its session. A new session gets its turn after the others of its tenant."""
        if session not in self._tenants:
            self._tenants[session] = tenant
            self._sessions.setdefault(tenant, {})[session] = None
            self.waiting[session] = deque()
        self.waiting[session].append(item)

    def put_back(self, session: int, tenant: str, item: _Item) -> None:
        """Undo `take`."""
        if session in self.waiting:
            self.waiting[session].appendleft(item)
        else:
            self.add(session, tenant, item)

    def take(self, session: int) -> _Item:
        """Remove and return the session's first item."""
        items = self.waiting[session]
        item = items.popleft()
        if not items:
            self._remove(session)
        return item

    def fail(self, session: int, error: BaseException, message: Any = None) -> None:
        """Note a bug at an item of the session, which has changed nothing. The session has no turn until `remove`."""
        self.failed[session] = Bug.of(error, message)

    def remove(self, session: int) -> Collection[_Item]:
        """Remove and return all items of the session, if it has any."""
        self.failed.pop(session, None)
        return self._remove(session)

    def _remove(self, session: int) -> Collection[_Item]:
        tenant = self._tenants.pop(session, None)
        if tenant is not None:
            del self._sessions[tenant][session]
            if not self._sessions[tenant]:
                del self._sessions[tenant]
        return self.waiting.pop(session, ())

    def next(self, is_ready: Callable[[int], bool] | None = None) -> int | None:
        """Return the first session that is ready, and move it behind the others. Return None if no session is ready."""
        for tenant, sessions in self._sessions.items():
            for session in sessions:
                if session not in self.failed and (is_ready is None or is_ready(session)):
                    del sessions[session]
                    sessions[session] = None
                    del self._sessions[tenant]
                    self._sessions[tenant] = sessions
                    return session
        return None


class _Part(NamedTuple):
    items: dict[int, Any] | list[Any]
    release: Callable[[Any], None]
    per_step: int


class Remains:
    """Items that wait to be released, in order per session: what closed sessions left, and lost arrays of open ones.

    Sessions take turns.

    A session may have 10^5 arrays, or 65,536 programs. To release them all at once takes hundreds of milliseconds.

    The remains are part of the state: the order and the time of each release follow from the events.
    """

    def __init__(self) -> None:
        self._turns: Turns[_Part] = Turns()
        self.waiting = self._turns.waiting

    def release_in_steps(
        self, session: Session, items: dict[int, Any] | list[Any], release: Callable[[Any], None], per_step: int = 1
    ) -> None:
        """Release the items, or the values of a dictionary, `per_step` of them in each step of a flush.

        `SMALL_ITEMS` or fewer are released at once, unless the session has left others. The caller does not use the
        collection any more. `release` is a method that `object_dumps.callback` declares.
        """
        number = session.number
        if len(items) <= SMALL_ITEMS and number not in self.waiting:
            for item in items.values() if isinstance(items, dict) else items:
                release(item)
        elif items:
            self._turns.add(number, session.tenant.name, _Part(items, release, per_step))

    def left(self, kind: type[Any]) -> list[Any]:
        """Return the items of this type that were not released yet."""
        collections = [part.items for parts in self.waiting.values() for part in parts]
        values = (items.values() if isinstance(items, dict) else items for items in collections)
        return [item for items in values for item in items if isinstance(item, kind)]

    def proceed(self, steps: int) -> None:
        """Release items of one session, up to the number of steps."""
        number = self._turns.next()
        if number is None:
            return
        while number in self.waiting and steps > 0:
            items, release, per_step = self.waiting[number][0]
            count = min(len(items), steps * per_step)
            for _ in range(count):
                release(items.popitem()[1] if isinstance(items, dict) else items.pop())
            steps -= -(-count // per_step)
            if not items:
                self._turns.take(number)


class Discards:
    """Large collections that nothing needs any more and that wait to be freed.

    A tuple of 65,536 objects that is dropped as a whole takes tens of milliseconds to free.

    The collections influence no decision, so snapshots do not contain them.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[list[Any], int]] = []  # with the number of objects per item

    def add(self, *collections: Collection[Any], size: int = 1) -> None:
        """Free the items later if there are many. Each item consists of about `size` objects.

        The caller drops its own references to the collections.
        """
        self.waiting += [(list(each), size) for each in collections if len(each) * size > SMALL_ITEMS]

    def proceed(self, steps: int) -> None:
        """Free some items."""
        left = steps * _DISCARDED_PER_STEP
        while self.waiting and left > 0:
            last, size = self.waiting[-1]
            count = min(len(last), max(1, left // size))
            left -= count * size + 1
            del last[len(last) - count :]
            if not last:
                self.waiting.pop()
