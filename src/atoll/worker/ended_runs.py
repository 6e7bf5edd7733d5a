"""Runs that were sent to this host and must not begin here, because other hosts do not take part in them.

The world of such a run was closed. In a later world, the run would meet another run of the other hosts, because XLA
does not number its collectives.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from atoll.errors import Status


class EndedRuns:
    """The runs that have ended, by sequence number, until they have failed here. Safe to use from any thread."""

    def __init__(self) -> None:
        self._statuses: dict[int, Status] = {}

    def __bool__(self) -> bool:
        return bool(self._statuses)

    def add(self, sequences: Iterable[int], status: Status) -> None:
        """End runs, before a later message makes another world for them."""
        self._statuses.update(dict.fromkeys(sequences, status))

    def take(self, sequence: int) -> Status | None:
        """Return with which status a run has ended, and forget it; None if it may begin."""
        return self._statuses.pop(sequence, None)

    def forget(self, sequences: Iterable[int], waiting: Container[int]) -> None:
        """Forget those of the runs that are not `waiting` to begin: they had begun before."""
        for sequence in sequences:
            if sequence not in waiting:
                self._statuses.pop(sequence, None)
