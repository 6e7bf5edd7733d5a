"""The order of gangs on one island.

First in, first out over all sessions; a session's own gangs never overtake one another, so that one which still waits
for bytes holds back its session and nobody else. Bounded: at most `window` gangs are in flight.

Pure: `enqueue`, `arrived`, `finished` and `drop` are the events; `next` hands out the gangs to start, in order.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Work = TypeVar("Work")


@dataclass(slots=True)
class Gang(Generic[Work]):
    """One node's execution on all its devices at once. `missing` counts what it still waits for."""

    sequence: int
    session: int
    work: Work
    missing: int = 0
    dropped: bool = False


@dataclass(frozen=True)
class SchedulerStatistics:
    """Gangs that wait, that are in flight, and that were started since the beginning."""

    waiting: int
    in_flight: int
    started: int
    window: int


@dataclass(slots=True)
class _Line(Generic[Work]):
    gangs: deque[Gang[Work]] = field(default_factory=deque)
    offered: bool = False  # its head stands in the heap


class IslandScheduler(Generic[Work]):
    """Decides what an island runs next.

    Once the window is full, it is filled again only when it is half empty: gangs then leave in batches, one message
    for many, and the island still has half a window of work.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._full = False
        self._lines: dict[int, _Line[Work]] = {}
        self._ready: list[tuple[int, int]] = []  # (sequence, session) of heads that lack nothing
        self._in_flight = 0
        self._started = 0

    def enqueue(self, gang: Gang[Work]) -> None:
        """The gang joins the end of its session's line. Sequence numbers rise."""
        line = self._lines.get(gang.session)
        if line is None:
            line = self._lines[gang.session] = _Line()
        line.gangs.append(gang)
        if len(line.gangs) == 1:
            self._offer(line)

    def arrived(self, gang: Gang[Work]) -> None:
        """One of the things that the gang waited for is here."""
        gang.missing -= 1
        line = self._lines.get(gang.session)
        if line is not None and line.gangs and line.gangs[0] is gang:
            self._offer(line)

    def next(self) -> Gang[Work] | None:
        """The next gang to start, or None while the window is full or nobody is ready."""
        while not self._full and self._ready:
            _, session = heapq.heappop(self._ready)
            line = self._lines.get(session)
            if line is None or not line.gangs:
                continue
            line.offered = False
            gang = line.gangs.popleft()
            if line.gangs:
                self._offer(line)
            else:
                del self._lines[session]
            if gang.dropped:
                continue
            self._in_flight += 1
            self._started += 1
            self._full = self._in_flight >= self.window
            return gang
        return None

    def finished(self, count: int = 1) -> None:
        """So many gangs have left the island."""
        self._in_flight -= count
        if self._in_flight <= self.window // 2:
            self._full = False

    def drop(self, gang: Gang[Work]) -> None:
        """The gang will not run: it lost a producer."""
        gang.dropped = True
        gang.missing = 0
        line = self._lines.get(gang.session)
        if line is not None and line.gangs and line.gangs[0] is gang:
            self._offer(line)

    def drop_session(self, session: int) -> list[Gang[Work]]:
        """The session has ended; returns the gangs of it that had not started."""
        line = self._lines.pop(session, None)
        return list(line.gangs) if line is not None else []

    def _offer(self, line: _Line[Work]) -> None:
        head = line.gangs[0]
        if head.missing <= 0 and not line.offered:
            line.offered = True
            heapq.heappush(self._ready, (head.sequence, head.session))

    def statistics(self) -> SchedulerStatistics:
        waiting = sum(len(line.gangs) for line in self._lines.values())
        return SchedulerStatistics(waiting, self._in_flight, self._started, self.window)
