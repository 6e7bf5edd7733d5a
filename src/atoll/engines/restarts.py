"""How often an island, or a controller with a bug, is restarted. Pure: the caller brings the time."""

from __future__ import annotations

from collections import deque

MAX_RESTARTS = 8
RESTART_SPAN_SECONDS = 60.0


class RestartPolicy:
    """Allows `MAX_RESTARTS` restarts in any `RESTART_SPAN_SECONDS`.

    Some restarts in a short time are bad luck; an island that needs more of them has a fault that no restart mends.
    """

    def __init__(self, who: str = "its workers") -> None:
        self._who = who
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)

    def allow(self, now: float) -> bool:
        """Whether there may be a restart at `now`, in seconds of any clock; counts the restart if so."""
        if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTART_SPAN_SECONDS:
            return False
        self._restarts.append(now)
        return True

    def excuse(self) -> None:
        """Do not count the newest restart: a program caused it, not the island."""
        if self._restarts:
            self._restarts.pop()

    @property
    def reason(self) -> str:
        """Why a restart is not allowed."""
        return f"{self._who} ended {MAX_RESTARTS + 1} times within {RESTART_SPAN_SECONDS:.0f} s"
