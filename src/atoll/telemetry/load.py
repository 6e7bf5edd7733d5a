"""The load of the controller's process, which its shell measures once a second and passes to the core with a tick.

The lag is the most by which the event loop was late: the longest turn of the loop, or the delay of the tick. Nothing
here runs per message: connections count their own messages, and one turn handles many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from atoll.protocol.events import Load
from atoll.state.tallies import Histogram

if TYPE_CHECKING:
    from atoll.wire.connection import ConnectionStatistics


class Counted(Protocol):
    """A connection that counts its messages."""

    def statistics(self) -> ConnectionStatistics: ...


class LoadMeter:
    """Measures the process. The shell updates `longest` after each turn of the loop."""

    def __init__(self, connections: Mapping[int, Counted], clock: Callable[[], float]) -> None:
        self.longest = 0.0  # turn since the last measurement, in seconds; the shell sets it
        self._connections = connections
        self._clock = clock
        self._due = 0.0
        self._closed = [0, 0, 0, 0]  # sums of closed connections

    def closed(self, connection: Counted) -> None:
        """Add the counts of a connection that has closed."""
        self._closed = [a + b for a, b in zip(self._closed, _counts(connection.statistics()), strict=True)]

    def measure(self, period: float) -> Load:
        """Return the load until now; the next measurement is due after `period` seconds."""
        now = self._clock()
        late = now - self._due if self._due else 0.0
        lag, self.longest, self._due = max(late, self.longest), 0.0, now + period
        messages_in, messages_out, bytes_in, bytes_out = self._closed
        unsent = 0
        for connection in self._connections.values():
            counts = connection.statistics()
            messages_in += counts.messages_in
            messages_out += counts.messages_out
            bytes_in += counts.bytes_in
            bytes_out += counts.bytes_out
            unsent += counts.unsent_bytes
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


def _counts(counts: ConnectionStatistics) -> tuple[int, int, int, int]:
    return counts.messages_in, counts.messages_out, counts.bytes_in, counts.bytes_out


class LoadRecord:
    """The load as the core keeps it: the last measurement, and a histogram of lags."""

    def __init__(self) -> None:
        self.last = Load()
        self.lag = Histogram()

    def record(self, load: Load | None) -> None:
        """Record a measurement; None if the shell measures nothing, as in virtual time."""
        if load is not None:
            self.last = load
            self.lag.observe(load.lag)
