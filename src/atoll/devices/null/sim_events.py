"""When things on null devices end: known as soon as all is known that they wait for.

A device does one piece of work after another. A piece over several hosts begins when the last of them has begun it,
as a collective does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class Clock(Protocol):
    """Real time, or a simulation's; in seconds."""

    def now(self) -> float: ...

    def call_at(self, when: float, call: Callable[[], None]) -> object: ...


class SimEvent:
    """A point in time, which may not be known yet (`at` is None)."""

    __slots__ = ("_clock", "_when_known", "_when_over", "at")

    def __init__(self, clock: Clock, at: float | None = None) -> None:
        self.at = at
        self._clock = clock
        self._when_known: list[Callable[[], None]] = []
        self._when_over: list[Callable[[], None]] = []

    def when(self) -> float:
        """`at`, of one that is known."""
        assert self.at is not None
        return self.at

    @property
    def is_over(self) -> bool:
        return self.at is not None and self.at <= self._clock.now()

    def when_known(self, call: Callable[[], None]) -> None:
        """Calls it once `at` is known; at once where it is."""
        if self.at is None:
            self._when_known.append(call)
        else:
            call()

    def when_over(self, call: Callable[[], None]) -> None:
        """Calls it at that time, by the clock; never from within."""
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
    """The end of something that takes `seconds` from when all its `parts` have joined and may begin."""

    __slots__ = ("_after", "_begin", "_parts", "_seconds", "_unknown")

    def __init__(self, clock: Clock, seconds: float, parts: int = 1) -> None:
        super().__init__(clock)
        self._seconds = seconds
        self._parts = parts
        self._begin = 0.0
        self._unknown = 0
        self._after: set[SimEvent] = set()  # which its parts wait for: mostly the same for all of them

    def join(self, after: Iterable[SimEvent]) -> None:
        """A part is there; it may begin once these are over."""
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
            self._after.clear()  # or every piece of work that ever was would live on
            self.settle(self._begin + self._seconds)


def all_of(clock: Clock, moments: Iterable[SimEvent]) -> SimEvent:
    """When the last of them is over."""
    distinct = list({id(moment): moment for moment in moments}.values())
    if len(distinct) == 1:
        return distinct[0]
    both = SimTask(clock, 0.0)
    both.join(distinct)
    return both
