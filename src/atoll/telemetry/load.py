"""How busy the controller's process is: measured by its shell, once a second, and given to the core with a tick.

The lag is how late the event loop was at most: what it did in one turn, or how long after its time the tick came.
Nothing is counted here for each message: connections count theirs anyway, and a turn is many messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from atoll.protocol.events import Load
from atoll.scheduling.tallies import Histogram


class ConnectionCounts(Protocol):
    """Of one connection, since it was made."""

    @property
    def messages_in(self) -> int: ...
    @property
    def messages_out(self) -> int: ...
    @property
    def bytes_in(self) -> int: ...
    @property
    def bytes_out(self) -> int: ...
    @property
    def unsent_bytes(self) -> int: ...


class Counted(Protocol):
    """A connection."""

    def statistics(self) -> ConnectionCounts: ...


class LoadMeter:
    """Measures the process. `turn(seconds)` is called once for each turn of the loop, with how long it took so far."""

    def __init__(self, connections: Mapping[int, Counted], clock: Callable[[], float]) -> None:
        self.longest = 0.0  # turn since the last measurement
        self._connections = connections
        self._clock = clock
        self._due = 0.0
        self._closed = [0, 0, 0, 0]  # of connections that are gone

    def closed(self, connection: Counted) -> None:
        """The connection counts no more."""
        self._closed = [a + b for a, b in zip(self._closed, _counts(connection.statistics()), strict=True)]

    def measure(self, period: float) -> Load:
        """The load until now; the next measurement is due after `period` seconds."""
        now = self._clock()
        late = now - self._due if self._due else 0.0
        lag, self.longest, self._due = max(late, self.longest), 0.0, now + period
        sums, unsent = list(self._closed), 0
        for connection in self._connections.values():
            counts = connection.statistics()
            sums = [a + b for a, b in zip(sums, _counts(counts), strict=True)]
            unsent += counts.unsent_bytes
        messages_in, messages_out, bytes_in, bytes_out = sums
        return Load(
            max(0.0, lag),
            time.process_time(),
            len(self._connections),
            messages_in,
            messages_out,
            bytes_in,
            bytes_out,
            unsent,
        )


def _counts(counts: ConnectionCounts) -> tuple[int, int, int, int]:
    return counts.messages_in, counts.messages_out, counts.bytes_in, counts.bytes_out


class LoadRecord:
    """What the core keeps of it: the last measurement, and a histogram of lags."""

    def __init__(self) -> None:
        self.last = Load()
        self.lag = Histogram()

    def record(self, load: Load | None) -> None:
        """One more; None where the shell measures nothing (in virtual time)."""
        if load is not None:
            self.last = load
            self.lag.observe(load.lag)
