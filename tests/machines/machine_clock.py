"""A clock for deadlines of processes, which runs slower while this machine has too much work.

Simulated machines share the processors with whatever else runs there. If each of their processes gets a tenth of its
usual share, a restart of an island takes ten times as long, and that is no hang.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

# The share of a processor that a thread gets while a soak runs on two processors, and nothing else does.
USUAL_SHARE = 0.25
# CPU time of a measurement, and seconds from one to the next.
_BURST_SECONDS, _PERIOD_SECONDS = 0.01, 1.0
_REMEMBERED = 10


def measured_share() -> float:
    """Return the share of a processor that this thread gets now."""
    wall, used = time.perf_counter(), time.thread_time()
    until = used + _BURST_SECONDS
    while time.thread_time() < until:
        pass
    return (time.thread_time() - used) / (time.perf_counter() - wall)


class MachineClock:
    """`seconds` are those of `now` while threads get at least their usual share of a processor, and fewer otherwise.

    Call `seconds` at least once per second. It measures the share once per second.
    """

    def __init__(self, share: Callable[[], float] = measured_share, now: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._now = now
        self._shares: deque[float] = deque(maxlen=_REMEMBERED)
        self._seconds = 0.0
        self._looked = self._measured = now()

    def seconds(self) -> float:
        now = self._now()
        if not self._shares or now - self._measured >= _PERIOD_SECONDS:
            self._measured = now
            self._shares.append(self._share())
        self._seconds += (now - self._looked) * min(1.0, fmean(self._shares) / USUAL_SHARE)
        self._looked = now
        return self._seconds


class Deadline:
    """A deadline `seconds` after its construction, by a `MachineClock`."""

    def __init__(self, seconds: float, clock: MachineClock | None = None) -> None:
        self._seconds = seconds
        self._clock = MachineClock() if clock is None else clock

    @property
    def is_over(self) -> bool:
        """Return whether the clock has passed the deadline. Read this at least once per second."""
        return self._clock.seconds() >= self._seconds
