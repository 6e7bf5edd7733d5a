"""Bound the work in flight on a host, for the controller and for hosts that dispatch delegated runs."""

from __future__ import annotations

# By what gangs took before.
BUSY_NS = 8_000_000
# What has never run counts so much: three of these keep a host busy for as long as it is to be.
NEW_NS = 2_700_000
# One runs, one is enqueued behind it, and one is on its way. Of gangs that take so long that their ends are known long
# before the next one ends, one waits behind the one that runs: that is all that a newcomer has to wait for.
_LEAST = 3
_LEAST_OF_LONG = 2
_LONG_NS = 8_000_000


def least_in_flight(busy_ns: int) -> int:
    """So many are in flight however long they take, where those that are count so many nanoseconds together."""
    return _LEAST_OF_LONG if busy_ns >= _LEAST_OF_LONG * _LONG_NS else _LEAST
