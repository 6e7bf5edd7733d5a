"""Sessions that take turns at work which the controller does in steps: by tenant first, then by session.

A tenant with nine sessions has as many turns as a tenant with one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class TurnFailedError(Exception):
    """A bug was met in the turn of a session, or of a command's connection. `__cause__` is the bug's own exception."""

    def __init__(self, *, session: int = 0, connection: int = 0) -> None:
        super().__init__(session, connection)
        self.sessions = (session,) if session else ()
        self.connections = (connection,) if connection else ()


class Turns(Generic[_Item]):
    """The items of work of sessions, in order, by tenant. The first tenant, and its first session, have the next turn.

    `waiting` has the items by session, and no session without items. Callers do not change which sessions it has.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, deque[_Item]] = {}
        self._sessions: dict[str, dict[int, None]] = {}
        self._tenants: dict[int, str] = {}

    def add(self, session: int, tenant: str, item: _Item) -> None:
        """Add an item behind the others of its session, which has turns after the others of its tenant from now on."""
        if session not in self._tenants:
            self._tenants[session] = tenant
            self._sessions.setdefault(tenant, {})[session] = None
            self.waiting[session] = deque()
        self.waiting[session].append(item)

    def take(self, session: int) -> _Item:
        """Remove and return the session's first item."""
        items = self.waiting[session]
        item = items.popleft()
        if not items:
            self.remove(session)
        return item

    def remove(self, session: int) -> Collection[_Item]:
        """Remove and return all items of the session, if it has some."""
        tenant = self._tenants.pop(session, None)
        if tenant is not None:
            del self._sessions[tenant][session]
            if not self._sessions[tenant]:
                del self._sessions[tenant]
        return self.waiting.pop(session, ())

    def next(self, is_ready: Callable[[int], bool] | None = None) -> int | None:
        """Return the first session that is ready, and move it behind the others; None if none of them is ready."""
        for tenant, sessions in self._sessions.items():
            for session in sessions:
                if is_ready is None or is_ready(session):
                    del sessions[session]
                    sessions[session] = None
                    del self._sessions[tenant]
                    self._sessions[tenant] = sessions
                    return session
        return None
