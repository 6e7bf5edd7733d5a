"""When an engine starts processes again that have ended, or whose start has failed. Pure: the callers pass the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from atoll.cluster.processes.child import may_pass

RETRY_SECONDS = 2.0  # between attempts to start processes for which files or memory are lacking
MAX_RESTARTS = 8
RESTART_SPAN_SECONDS = 60.0


class RestartPolicy:
    """Allows `MAX_RESTARTS` restarts in any `RESTART_SPAN_SECONDS`.

    More restarts than that do not help: they mean a permanent fault.
    """

    def __init__(self, subject: str = "its workers") -> None:
        self._subject = subject
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)

    def allow(self, now: float) -> bool:
        """Return whether a restart is allowed at `now`, in seconds of any clock. If so, count it."""
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
        """Return why a restart is not allowed."""
        return f"{self._subject} ended {MAX_RESTARTS + 1} times within {RESTART_SPAN_SECONDS:.0f} s"


class StartRetries:
    """Allows attempts to start processes, for `RESTART_SPAN_SECONDS`, while files or memory are lacking for them.

    Args:
        subject: The processes, such as "the controller".
        warn: Receives a format and its arguments when the first of some attempts has failed.
    """

    def __init__(self, subject: str, warn: Callable[..., None]) -> None:
        self._subject = subject
        self._warn = warn
        self._since: float | None = None  # when the first of the present failures was

    @property
    def is_lacking(self) -> bool:
        """Return whether the last start failed for lack of files or memory."""
        return self._since is not None

    def allow(self, error: OSError, now: float) -> bool:
        """Return whether another attempt, `RETRY_SECONDS` after one that failed at `now`, may succeed."""
        if not may_pass(error):
            return False
        if self._since is None:
            self._since = now
            text = "%s cannot be started now, will retry for %.0f s: %s"
            self._warn(text, self._subject, RESTART_SPAN_SECONDS, error)
        return now - self._since < RESTART_SPAN_SECONDS

    def started(self) -> None:
        """Note that a start has succeeded."""
        self._since = None
