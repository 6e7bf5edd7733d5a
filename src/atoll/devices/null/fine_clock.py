"""Real time for null devices, to microseconds: event loops wake by the millisecond."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import os
import time
from collections.abc import Callable
from itertools import count

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME: by the monotonic clock's own count


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class FineClock:
    """As `moments.Clock`: a kernel timer of which the loop learns as of a socket (Python has these from 3.13 on)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._loop = loop
        self._looks = False  # soon, at what is due
        self._set_for = 0.0
        self.now = time.monotonic
        loop.add_reader(self._timer, self._ring)

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """On the loop's thread, and from there only."""
        heapq.heappush(self._due, (when, next(self._numbers), call))
        # Much is due within microseconds. It needs no timer: the loop comes by again.
        if not self._looks:
            self._looks = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looks = False
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
        nanoseconds = max(1, int(when * 1e9))  # 0 would stop it
        value = _Timespec(nanoseconds // 10**9, nanoseconds % 10**9)
        spec = _Itimerspec(_Timespec(0, 0), value)
        if self._libc.timerfd_settime(self._timer, _ABSOLUTE, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
