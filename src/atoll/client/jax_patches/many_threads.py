"""Keeps hundreds of threads that read arrays from starving one another.

A thread that waits for Python's interpreter lock wakes after each switch interval, 5 ms, to ask for the lock. A
thousand waiting threads wake 200,000 times per second, which takes all CPU time from the thread that holds the lock. On
stock JAX a short call ends before the next thread has started. A call on a cluster takes a round trip, so all threads
wait at the same time.

A read lengthens the interval in proportion to the number of threads. The first read after most of them have ended
restores the usual interval. Nothing changes an interval that the user has set.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement

_USUAL = 0.005  # Python's own interval in seconds
_PER_THREAD = 1e-4  # each waiting thread then wakes for about 1 % of a core in all


class SwitchInterval:
    """Adapts the interpreter's switch interval to the number of threads."""

    def __init__(self) -> None:
        self._set = _USUAL

    def adapt(self, threads: int) -> None:
        wanted = max(_USUAL, threads * _PER_THREAD)
        # With many threads the number changes often: ignore small changes.
        if wanted == self._set or _USUAL < wanted < self._set < 2 * wanted:
            return
        if abs(sys.getswitchinterval() - self._set) < _USUAL / 100:  # otherwise the user has set it
            self._set = wanted
            sys.setswitchinterval(wanted)


def _with_many_threads(value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    interval = SwitchInterval()

    def _value(self: Any) -> Any:
        if self._npy_value is None:  # otherwise nothing waits
            interval.adapt(threading.active_count())
        return value(self)

    return _value


PATCH = Patch(
    name="many threads",
    enables="reads by hundreds of threads within seconds instead of minutes",
    changes=(Replacement("jaxlib._jax:ArrayImpl", "_value", _with_many_threads, ("self",)),),
)
