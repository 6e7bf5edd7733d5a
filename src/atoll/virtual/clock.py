"""Virtual time: an event heap that jumps from event to event."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from atoll.errors import ClusterError


class VirtualClock:
    """As `devices.null.sim_events.Clock`. Events of the same time happen in the order in which they were added."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def now(self) -> float:
        """In seconds since the simulation began."""
        return self._now

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Calls it at that time, never from within this call; a time in the past means now."""
        heapq.heappush(self._events, (max(when, self._now), self._number, call))
        self._number += 1

    def call_soon(self, call: Callable[[], None]) -> None:
        self.call_at(self._now, call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.call_at(self._now + seconds, call)

    def run_until(self, is_over: Callable[[], bool], deadline: float) -> None:
        """Lets time pass until `is_over()`. Raises ClusterError if that is not so by the `deadline`, in seconds."""
        while not is_over():
            if not self._events or self._events[0][0] > deadline:
                raise ClusterError(f"after {self._now:.6f} s of virtual time, what was waited for has not happened")
            self._now, _, call = heapq.heappop(self._events)
            call()
