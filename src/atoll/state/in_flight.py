"""Bounds on the work in flight on a host, for the controller and for hosts that dispatch delegated runs."""

from __future__ import annotations

# Expected duration of the gangs in flight on a host, based on earlier runs.
BUSY_NS = 8_000_000
# Expected duration of a gang that has never run. Three of these reach `BUSY_NS`.
NEW_NS = 2_700_000
# Gangs in flight whatever their durations: one runs, one is enqueued behind it, and one is on its way.
_LEAST = 3
# Two are enough for long gangs, whose ends are known long before the next one ends. Other sessions wait less then.
_LEAST_OF_LONG = 2
_LONG_NS = 8_000_000


def least_in_flight(busy_ns: int) -> int:
    """Return how many gangs may be in flight whatever their durations, if those in flight take `busy_ns` together."""
    return _LEAST_OF_LONG if busy_ns >= _LEAST_OF_LONG * _LONG_NS else _LEAST
