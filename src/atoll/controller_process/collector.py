"""Python's garbage collector in the controller: it runs between turns of the loop, in short collections.

Python itself collects in the middle of a message, and looks through more objects the more there are: arrays, programs
and launches of all sessions. No session is served meanwhile. Here each object is looked at twice, together with those
that were made at about the same time, and then never again: it is freed when nothing refers to it. Cycles that form
among older objects are found only while there are no sessions. The controller's own records form none.
"""

from __future__ import annotations

import gc

# A turn ends with a collection if so many objects more are alive than after the last one, or after this time. The
# number is not enough: it stays the same while as many old objects go as new ones come.
YOUNG = 1_000
SECONDS = 0.02
# Of so many collections, one looks also at what the others left, for the last time.
_PER_LAST_LOOK = 4
# Such last looks until it is worth looking at everything again, which takes 30 to 50 ms.
LAST_LOOKS = 64


class Collector:
    """Runs the garbage collector of this process, from `start` on."""

    def __init__(self) -> None:
        self._is_started = False
        self._due = 0.0
        self._collections = 0  # since the last one that looked also at what the others left
        self._last_looks = 0  # since everything was looked at

    def start(self) -> None:
        """Take over from Python, and look at nothing that has been made until now: modules, for the most part."""
        gc.freeze()
        gc.disable()
        self._is_started = True

    def turn_ended(self, now: float) -> None:
        """Collect if it is time. `now` is in seconds, by a clock that never goes back."""
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
        """Look at everything, modules included, if much was left out since the last time."""
        if self._last_looks >= LAST_LOOKS:
            gc.unfreeze()
            self._look_at_the_rest()
            self._last_looks = 0
