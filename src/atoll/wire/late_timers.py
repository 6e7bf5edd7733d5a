"""Timers of a process that may be stopped, or whose machine may be too busy to run it.

After such a time, an event loop handles its timers before it has read what peers sent meanwhile: a loop reads at most a
part of what has arrived on each connection first, and accepts new connections, and uvloop does not even do that. So a
deadline would count for peers that have kept it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# A timer that is later than this shows that the process did not run, or that a turn of its loop took too long.
LATE_SECONDS = 1.0
# For reading what has arrived by then.
READ_SECONDS = 0.25


class ReadingTimer:
    """Calls `callback` when the loop's clock shows `when`. If that is late, it lets the process read for a while first.

    A timer waits at most once, for `READ_SECONDS`, so a loop that is always late still handles all of its timers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, when: float, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._when = when
        self._callback = callback
        self._handle = loop.call_at(when, self._due)

    def cancel(self) -> None:
        """Do not call the callback."""
        self._handle.cancel()

    def _due(self) -> None:
        if self._loop.time() - self._when > LATE_SECONDS:
            self._handle = self._loop.call_later(READ_SECONDS, self._callback)
        else:
            self._callback()


def call_later(loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], None]) -> ReadingTimer:
    """Return a `ReadingTimer` that is due after `seconds`."""
    return ReadingTimer(loop, loop.time() + seconds, callback)
