"""The window of gangs in flight on a host, for the controller and for hosts that dispatch delegated runs."""

from __future__ import annotations

from dataclasses import dataclass

# Expected duration of the gangs in flight on a host, based on earlier runs.
BUSY_NS = 8_000_000
# Expected duration of a gang that has never run. Three of these reach `BUSY_NS`.
NEW_NS = 2_700_000
# Gangs in flight whatever their durations: one runs, one is enqueued behind it, and one is on its way.
_MIN_IN_FLIGHT = 3
# Two are enough for long gangs, whose ends are known long before the next one ends. Other sessions wait less then.
_MIN_IN_FLIGHT_OF_LONG = 2
_LONG_NS = 8_000_000


@dataclass(slots=True)
class HostWindow:
    """The gangs in flight on one host. `full` is set and read by the scheduler, since it depends on the next gang."""

    in_flight: int = 0  # number of gangs, by weight
    busy_ns: int = 0  # their expected duration
    full: bool = False

    @property
    def least(self) -> int:
        """The number of gangs that may be in flight, however long they take."""
        return _MIN_IN_FLIGHT_OF_LONG if self.busy_ns >= _MIN_IN_FLIGHT_OF_LONG * _LONG_NS else _MIN_IN_FLIGHT

    def is_busy(self, max_ns: int = BUSY_NS) -> bool:
        """Return whether the gangs in flight keep the host busy, so that another one would only wait there."""
        return self.busy_ns >= max_ns and self.in_flight >= self.least

    def has_room_again(self, window: int, max_ns: int) -> bool:
        """Return whether a host that was full takes gangs again: half of its window is free, or too few are left."""
        return self.in_flight < self.least or (self.in_flight <= window // 2 and self.busy_ns <= max_ns // 2)

    def start(self, weight: int, nanoseconds: int) -> None:
        """Count a gang with this weight and expected duration."""
        self.in_flight += weight
        self.busy_ns += nanoseconds

    def end(self, weight: int, nanoseconds: int) -> None:
        """Stop counting a gang, by the numbers with which it was started."""
        self.in_flight -= weight
        self.busy_ns -= nanoseconds
