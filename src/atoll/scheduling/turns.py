"""Sessions that take turns at work which the controller does in steps: by tenant first, then by session.

A tenant with nine sessions has as many turns as a tenant with one.
"""

from __future__ import annotations

from collections.abc import Callable


class TurnFailedError(Exception):
    """A bug was met in the turn of a session, or of a command's connection. `__cause__` is the bug's own exception."""

    def __init__(self, *, session: int = 0, connection: int = 0) -> None:
        super().__init__(session, connection)
        self.sessions = (session,) if session else ()
        self.connections = (connection,) if connection else ()


class Turns:
    """The sessions that have work, by tenant. The first tenant, and its first session, have the next turn."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[int, None]] = {}
        self._tenants: dict[int, str] = {}

    def add(self, session: int, tenant: str) -> None:
        """Give the session turns from now on, after the others of its tenant. Does nothing if it has some."""
        if session not in self._tenants:
            self._tenants[session] = tenant
            self._waiting.setdefault(tenant, {})[session] = None

    def remove(self, session: int) -> None:
        """Give the session no turns any more, if it has some."""
        tenant = self._tenants.pop(session, None)
        if tenant is not None:
            del self._waiting[tenant][session]
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def next(self, is_ready: Callable[[int], bool] | None = None) -> int | None:
        """Return the first session that is ready, and move it behind the others; None if none of them is ready."""
        for tenant, sessions in self._waiting.items():
            for session in sessions:
                if is_ready is None or is_ready(session):
                    del sessions[session]
                    sessions[session] = None
                    del self._waiting[tenant]
                    self._waiting[tenant] = sessions
                    return session
        return None
