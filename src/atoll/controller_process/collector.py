"""Python's garbage collector in the controller: it runs between turns of the loop, in short collections.

By default, Python collects in the middle of a message and examines more objects the more arrays, programs and launches
exist, which delays all sessions. This collector examines each object twice, together with objects of about the same
age, and then never again: reference counting frees it. Cycles that form among older objects are collected only while
there are no sessions. The controller's own records form no cycles.
"""

from __future__ import annotations

import gc

# A turn ends with a collection if the number of live objects has grown by this since the last one, or after this time.
# The number is not sufficient: it stays constant while old objects are freed as fast as new ones are made.
YOUNG = 1_000
SECONDS = 0.05
# One of this many collections also examines the survivors of the others, for the last time.
_PER_LAST_LOOK = 4
# Such collections until it pays to examine everything again, which takes 30 to 50 ms.
LAST_LOOKS = 64


class Collector:
    """Runs the garbage collector of this process after `start`."""

    def __init__(self) -> None:
        self._is_started = False
        self._due = 0.0
        self._collections = 0  # since the last one that examined survivors
        self._last_looks = 0  # since everything was examined

    def start(self) -> None:
        """Replace Python's schedule, and exempt all existing objects, most of which are modules."""
        gc.freeze()
        gc.disable()
        self._is_started = True

    def turn_ended(self, now: float) -> None:
        """Collect if it is due. `now` is in seconds of a monotonic clock."""
        if not self._is_started or (now < self._due and gc.get_count()[0] < YOUNG):
            return
        self._due = now + SECONDS
        self._collections += 1
        if self._collections < _PER_LAST_LOOK:
            gc.collect(0)
        else:
            self._look_at_the_rest()

    def _look_at_the_rest(self) -> None:
        gc.collect()
        gc.freeze()
        self._collections = 0
        self._last_looks += 1

    def collect_all(self) -> None:
        """Examine everything, including modules, if enough objects were exempted since the last time."""
        if self._last_looks >= LAST_LOOKS:
            gc.unfreeze()
            self._look_at_the_rest()
            self._last_looks = 0
