"""Sums over gangs of a delegated run that have ended: a host reports these instead of one message per gang."""

from __future__ import annotations

from atoll.protocol import messages as m
from atoll.state.tallies import counts_of


class EndedGangs:
    """Gangs that have ended on a host since its last report, one after another.

    `started` is the dispatch of the first one, and `free` the end of the work before it, by the host's clock.
    """

    __slots__ = ("_ended", "_free", "_samples", "_started", "_took")

    def __init__(self, started: int, free: int) -> None:
        self._started = started
        self._free = free
        self._ended = 0
        self._took: list[int] = []
        self._samples: dict[int, int] = {}

    def add(self, place: int, ended: int, took: int, is_sampled: bool) -> None:
        """Add the gang at a place in the plan, which has had its devices for `took` nanoseconds."""
        self._took.append(took)
        self._ended = max(self._ended, ended)
        if is_sampled:
            self._samples[place] = took

    def counted(self) -> m.GangsEnded:
        took = self._took
        return m.GangsEnded(
            sum(took), self._started, self._free, self._ended, tuple(counts_of(took)), tuple(self._samples.items())
        )
