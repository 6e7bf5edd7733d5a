"""Release functions of sessions after the Python gangs that may need them have started.

A Python function may hold objects that are used by calls of other functions that are in line. So the release of a
function waits until all earlier Python gangs of its session have started. Then it is done in steps. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice, takewhile

from atoll.launch.shared_state import SharedState
from atoll.state.session import Session

# Deferred releases of functions that one flush does, and of these in the turn of one session.
_MAX_RELEASED = 64
_MAX_PER_TURN = 16


class FunctionReleases:
    """The releases of functions that are deferred. `Session.deferred_releases` has those of each session.

    `drop(session, function)` drops a function of a session.
    """

    def __init__(self, shared: SharedState, drop: Callable[[Session, int], None]) -> None:
        self._sessions = shared.sessions
        self._drop = drop
        self._deferred: set[int] = set()  # sessions with deferred releases
        # Sessions whose deferred releases can be done now. The first one is next.
        self.due: dict[int, None] = {}

    def release(self, session: Session, function: int) -> None:
        """Release a function of the session after all earlier Python gangs of the session have started."""
        if session.python_gangs:
            session.deferred_releases.append((max(session.python_gangs), function))
            self._deferred.add(session.number)
        else:
            self._drop(session, function)

    def proceed(self) -> None:
        """Do the deferred releases that need not wait any more, or some of them."""
        for number in sorted(self._deferred):
            session = self._sessions.get(number)
            if session is None or not session.deferred_releases:
                self._deferred.discard(number)
            elif _count_due(session, 1):
                self.due.setdefault(number)
        left = _MAX_RELEASED
        while self.due and left > 0:
            number = next(iter(self.due))
            del self.due[number]
            session = self._sessions.get(number)
            if session is not None:
                left -= 1 + self._release_due(session, _MAX_PER_TURN)
                if _count_due(session, 1):
                    self.due[number] = None

    def _release_due(self, session: Session, limit: int) -> int:
        """Do at most `limit` deferred releases that need not wait any more. Return their number."""
        count = _count_due(session, limit)
        for _ in range(count):
            self._drop(session, session.deferred_releases.popleft()[1])
        return count


def _count_due(session: Session, limit: int) -> int:
    """Return how many deferred releases of the session need not wait any more, or `limit` if there are more."""
    first_waiting = min(session.python_gangs, default=math.inf)
    due = takewhile(lambda release: release[0] < first_waiting, islice(session.deferred_releases, limit))
    return sum(1 for _ in due)
