"""Repeat what fails for a while, such as connecting to a process that is still starting."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")
Errors = type[Exception] | tuple[type[Exception], ...]

_JITTER = 0.2


class Retry:
    """The attempts of one operation: `call` repeats a function, and `next_pause` paces a loop that does more.

    The pause after an attempt is `first` seconds. Each one is twice as long as the one before, up to `limit` seconds,
    which is `first` unless given. Pauses vary by 20 %, so that processes do not all retry at once. The last attempt
    begins at the latest `patience` seconds after this object was created.
    """

    def __init__(self, first: float, limit: float = 0.0, *, patience: float = math.inf) -> None:
        self._first = self._pause = first
        self._limit = max(first, limit)
        self._deadline = time.monotonic() + patience

    @property
    def is_over(self) -> bool:
        """Return whether the time for attempts has passed."""
        return time.monotonic() >= self._deadline

    @property
    def seconds_left(self) -> float:
        """Return the time that is left for attempts."""
        return max(0.0, self._deadline - time.monotonic())

    def next_pause(self) -> float:
        """Return the seconds to wait before the next attempt."""
        pause = self._pause * random.uniform(1 - _JITTER, 1 + _JITTER)
        self._pause = min(2 * self._pause, self._limit)
        return max(0.0, min(pause, self._deadline - time.monotonic()))

    def reset(self) -> None:
        """Begin with the first pause again."""
        self._pause = self._first

    def call(self, attempt: Callable[[], Result], on: Errors, unless: Errors = ()) -> Result:
        """Call `attempt` until it raises no error `on`, or until the time is over. Raise its last error then.

        Errors of the types `unless` are raised at once, even if they are also of a type `on`.
        """
        while True:
            try:
                return attempt()
            except unless:
                raise
            except on:
                if self.is_over:
                    raise
            time.sleep(self.next_pause())

    async def call_async(self, attempt: Callable[[], Awaitable[Result]], on: Errors, unless: Errors = ()) -> Result:
        """Await `attempt` as `call` calls it."""
        while True:
            try:
                return await attempt()
            except unless:
                raise
            except on:
                if self.is_over:
                    raise
            await asyncio.sleep(self.next_pause())


class Reasons:
    """Logs each reason of a lasting problem once, not once per attempt."""

    def __init__(self, log: logging.Logger, level: int = logging.WARNING) -> None:
        self._log = log
        self._level = level
        self._logged: set[str] = set()

    def log(self, text: str) -> None:
        """Log the text, unless it was logged since the problem was last solved."""
        if text not in self._logged:
            self._logged.add(text)
            self._log.log(self._level, "%s", text)

    def solved(self) -> None:
        """Log all reasons again if the problem returns."""
        self._logged.clear()

    def __bool__(self) -> bool:
        """Return whether a problem was logged that is not solved."""
        return bool(self._logged)
