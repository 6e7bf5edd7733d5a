"""Connections that have been accepted and have not said yet what they are for. Pure: its callers bring the time.

Anybody who reaches a data port can make such connections. So they are few and do not stay: who connects while there
are `MAX_UNOPENED` takes the place of the oldest, and an honest peer opens its connection at once.
"""

from __future__ import annotations

from typing import Generic, TypeVar

MAX_UNOPENED = 64
OPEN_SECONDS = 10.0

Connection = TypeVar("Connection")


class Unopened(Generic[Connection]):
    """The connections, in the order of their coming. Times are in seconds of the caller's clock."""

    def __init__(self, most: int = MAX_UNOPENED, seconds: float = OPEN_SECONDS) -> None:
        self._most = most
        self._seconds = seconds
        self._since: dict[Connection, float] = {}

    def add(self, connection: Connection, now: float) -> Connection | None:
        """A connection was accepted. Returns the one to be closed for it, where there are too many."""
        evicted = self.oldest() if len(self._since) >= self._most else None
        if evicted is not None:
            del self._since[evicted]
        self._since[connection] = now
        return evicted

    def remove(self, connection: Connection) -> bool:
        """It has opened, or ended; False where it was to be closed before that."""
        return self._since.pop(connection, None) is not None

    def oldest(self) -> Connection | None:
        return next(iter(self._since), None)

    def expired(self, now: float) -> list[Connection]:
        """Those that have taken too long; they are forgotten here, and the caller closes them."""
        late = [each for each, since in self._since.items() if now - since >= self._seconds]
        for each in late:
            del self._since[each]
        return late

    def next_deadline(self) -> float | None:
        """When the next one expires; None where there is none."""
        oldest = self.oldest()
        return None if oldest is None else self._since[oldest] + self._seconds

    def __len__(self) -> int:
        return len(self._since)
