"""Virtual time: an event heap that jumps from event to event, and coroutines that run on it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from atoll.errors import ClusterError


class VirtualClock:
    """A `devices.null.sim_events.Clock`. Events at the same time run in the order in which they were added."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def now(self) -> float:
        """Return the seconds since the simulation began."""
        return self._now

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Schedule `call`; a time in the past means now. The call never runs before `call_at` returns."""
        heapq.heappush(self._events, (max(when, self._now), self._number, call))
        self._number += 1

    def call_soon(self, call: Callable[[], None]) -> None:
        self.call_at(self._now, call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.call_at(self._now + seconds, call)

    def run_until(self, is_over: Callable[[], bool], deadline: float) -> None:
        """Run events until `is_over()`. Raise ClusterError if it is still false at `deadline`, in seconds."""
        while not is_over():
            if not self._events or self._events[0][0] > deadline:
                raise ClusterError(f"the awaited event did not happen within {self._now:.6f} s of virtual time")
            self._now, _, call = heapq.heappop(self._events)
            call()


Result = TypeVar("Result")


class Future(Generic[Result]):
    """A value that is set later: the part of `asyncio.Future` that clients use."""

    def __init__(self) -> None:
        self._result: tuple[Result] | None = None  # once it is set
        self._when_done: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self._result is not None

    def set_result(self, result: Result) -> None:
        self._result = (result,)
        calls, self._when_done = self._when_done, []
        for call in calls:
            call()

    def when_done(self, call: Callable[[], None]) -> None:
        if self._result is not None:
            call()
        else:
            self._when_done.append(call)

    def result(self) -> Result:
        """Return the value, which must be set."""
        assert self._result is not None
        return self._result[0]

    def __await__(self) -> Generator[Future[Any], None, Result]:
        if self._result is None:
            yield self
        return self.result()


class Task(Future[Result]):
    """Runs a coroutine, and resumes it as soon as the future that it awaits has a result.

    The coroutine may await only futures of this module. Its exceptions propagate through `VirtualClock.run_until`.
    """

    def __init__(self, clock: VirtualClock, work: Coroutine[Any, Any, Result]) -> None:
        super().__init__()
        self._clock = clock
        self._work = work
        clock.call_soon(self._step)

    def _step(self) -> None:
        try:
            awaited = self._work.send(None)
        except StopIteration as end:
            self.set_result(end.value)
            return
        awaited.when_done(lambda: self._clock.call_soon(self._step))
