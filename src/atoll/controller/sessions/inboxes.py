"""Messages of sessions that wait while large work for the session is done in steps: they are handled in order.

Each flush of the controller handles a few of them, so that many of them hold up nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.scheduling.session import Session

# Of one session.
MAX_WAITING = 8192
_PER_FLUSH = 4  # of each session


class Inboxes:
    """By session. `handle(session, message)` takes a message when its turn comes; `end(session, status)` ends one."""

    def __init__(
        self,
        sessions: Mapping[int, Session],
        handle: Callable[[int, Any], None],
        end: Callable[[int, Status], None],
    ) -> None:
        self._sessions = sessions
        self._handle = handle
        self._end = end
        self._waiting: dict[int, deque[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def received(self, number: int, message: Any) -> None:
        """Handle a message of the session's proxy, now or when its turn comes."""
        session = self._sessions.get(number)
        if session is None:
            return
        waiting = self._waiting.get(number)
        if (waiting is None and not session.in_steps) or type(message) is m.Pong:
            self._handle(number, message)
            return
        if waiting is None:
            waiting = self._waiting[number] = deque()
        waiting.append(message)
        if len(waiting) > MAX_WAITING:
            text = f"{MAX_WAITING} messages of this session wait for its large programs: at most as many may"
            self._end(number, Status(Code.RESOURCE_EXHAUSTED, text))

    def proceed(self) -> None:
        """Handle some of the messages whose turn it is."""
        for number in list(self._waiting):
            for _ in range(_PER_FLUSH):
                waiting = self._waiting.get(number)
                if waiting is None or self._sessions[number].in_steps:
                    break
                message = waiting.popleft()
                if not waiting:
                    del self._waiting[number]
                self._handle(number, message)

    def session_closed(self, session: Session) -> None:
        self._waiting.pop(session.number, None)
