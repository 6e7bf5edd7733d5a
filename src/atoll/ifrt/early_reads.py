"""Which arrays are read from their hosts before the proxy knows that they are ready.

A host that has computed an array can send it at once, without a launch of the read. If it has not, one of its threads
waits for the array, and wakes at the same time as the thread that reports the computation. A serving loop launches a
step and then reads the result of the one before: there, these threads take CPU time from the step that runs. So the
proxy asks only for arrays that were launched a while ago, for a longer while if others were launched later, and less
often after hosts could not send them.
"""

from __future__ import annotations

from collections.abc import Callable

MIN_SECONDS = 1e-3  # since the launch, in which short computations end
MIN_SECONDS_BEFORE_OTHERS = 0.1  # if others were launched later
_MAX_DOUBLINGS = 6  # of the number of reads that are not tried after a miss


class EarlyReads:
    """The early reads of one session. `now` returns seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._misses = 0  # without a hit between them
        self._has_missed = False  # the last try
        self._left = 0  # reads that are not tried
        self._newest = 0.0  # when the last launch was handled

    def launched(self, made_at: float) -> None:
        """Note a launch that was handled at `made_at`."""
        self._newest = made_at

    def may_try(self, made_at: float) -> bool:
        """Return whether to ask the host of an array, whose launch was handled at `made_at`."""
        if self._now() - made_at < (MIN_SECONDS_BEFORE_OTHERS if made_at < self._newest else MIN_SECONDS):
            return False
        if self._left:
            self._left -= 1
            return False
        if not self._has_missed:
            self._misses = 0
        self._has_missed = False
        return True

    def missed(self) -> None:
        """Note that the host could not send the array of a try."""
        self._misses = min(self._misses + 1, _MAX_DOUBLINGS)
        self._has_missed = True
        self._left = 2**self._misses
