"""Time on null devices: clocks, events, and tasks whose end is computed in advance.

A device runs one task after another. A task on several hosts begins when the last of them reaches it, as a collective
does. The end of a task is known as soon as the ends of all events that it waits for are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import os
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Protocol


class EventClock(Protocol):
    """Real or simulated time, in seconds."""

    def now(self) -> float: ...

    def call_at(self, when: float, call: Callable[[], None]) -> object: ...


class SimEvent:
    """A point in time. `at` is None while it is not known."""

    __slots__ = ("_clock", "_when_known", "_when_over", "at")

    def __init__(self, clock: EventClock, at: float | None = None) -> None:
        self.at = at
        self._clock = clock
        self._when_known: list[Callable[[], None]] = []
        self._when_over: list[Callable[[], None]] = []

    def when(self) -> float:
        """Return `at`, which must be known."""
        assert self.at is not None
        return self.at

    @property
    def is_over(self) -> bool:
        return self.at is not None and self.at <= self._clock.now()

    def when_known(self, call: Callable[[], None]) -> None:
        """Call `call` as soon as `at` is known, which may be now."""
        if self.at is None:
            self._when_known.append(call)
        else:
            call()

    def when_over(self, call: Callable[[], None]) -> None:
        """Have the clock call `call` at that time; never call it from within."""
        self._when_over.append(call)
        if self.at is not None and len(self._when_over) == 1:
            self._clock.call_at(self.at, self._over)

    def settle(self, at: float) -> None:
        self.at = at
        if self._when_over:
            self._clock.call_at(at, self._over)
        calls, self._when_known = self._when_known, []
        for call in calls:
            call()

    def _over(self) -> None:
        calls, self._when_over = self._when_over, []
        for call in calls:
            call()


class SimTask(SimEvent):
    """The end of a task that takes `seconds`, beginning when all of its `parts` have joined and may begin."""

    __slots__ = ("_after", "_begin", "_parts", "_seconds", "_unknown")

    def __init__(self, clock: EventClock, seconds: float, parts: int = 1) -> None:
        super().__init__(clock)
        self._seconds = seconds
        self._parts = parts
        self._begin = 0.0
        self._unknown = 0
        self._after: set[SimEvent] = set()  # the events that its parts wait for, which are mostly the same

    def join(self, after: Iterable[SimEvent]) -> None:
        """Add a part that may begin when all events of `after` are over."""
        self._begin = max(self._begin, self._clock.now())
        for moment in after:
            if moment in self._after:
                continue
            self._after.add(moment)
            if moment.at is not None:
                self._begin = max(self._begin, moment.at)
            else:
                self._unknown += 1
                moment.when_known(lambda moment=moment: self._learn(moment))  # type: ignore[misc]
        self._parts -= 1
        self._settle_if_known()

    def _learn(self, moment: SimEvent) -> None:
        assert moment.at is not None
        self._begin = max(self._begin, moment.at)
        self._unknown -= 1
        self._settle_if_known()

    def _settle_if_known(self) -> None:
        if not self._parts and not self._unknown:
            self._after.clear()  # otherwise, each task would keep all earlier tasks alive
            self.settle(self._begin + self._seconds)


def all_of(clock: EventClock, moments: Iterable[SimEvent]) -> SimEvent:
    """Return the event of the last of `moments`."""
    distinct = list({id(moment): moment for moment in moments}.values())
    if len(distinct) == 1:
        return distinct[0]
    both = SimTask(clock, 0.0)
    both.join(distinct)
    return both


_ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class FineClock:
    """Real time with a resolution of microseconds: an `EventClock` for the thread of an event loop.

    The timers of asyncio have a resolution of 1 ms. This clock uses a kernel timer, which the loop polls like a socket.
    Python has such timers since 3.13.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._loop = loop
        self._look_is_scheduled = False
        self._set_for = 0.0
        self.now = time.monotonic
        loop.add_reader(self._timer, self._ring)

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), call))
        # Many calls are due within microseconds. The next iteration of the loop runs them without a timer.
        if not self._look_is_scheduled:
            self._look_is_scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._look_is_scheduled = False
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        if self._due and self._due[0][0] != self._set_for:
            self._set(self._due[0][0])

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._timer, 8)
        self._set_for = 0.0
        self._look()

    def _set(self, when: float) -> None:
        self._set_for = when
        nanoseconds = max(1, int(when * 1e9))  # 0 would stop the timer
        value = _Timespec(nanoseconds // 10**9, nanoseconds % 10**9)
        spec = _Itimerspec(_Timespec(0, 0), value)
        if self._libc.timerfd_settime(self._timer, _ABSOLUTE, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
