"""Large collections that nothing needs any more, freed some items at a time.

A tuple of 65,536 objects that is dropped as a whole takes tens of milliseconds to free.

Pure, and without influence on any decision: a snapshot has none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Shorter ones are freed at once.
_SMALL_ITEMS = 64
# Items per step of a flush.
_PER_STEP = 8


class Discards:
    """Collections that wait to be freed."""

    def __init__(self) -> None:
        self._waiting: list[list[Any]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, *collections: Sequence[Any]) -> None:
        """Free the items later, if there are many. The caller drops its own references to the collections."""
        self._waiting += [list(each) for each in collections if len(each) > _SMALL_ITEMS]

    def proceed(self, steps: int) -> None:
        """Free some items."""
        left = steps * _PER_STEP
        while self._waiting and left > 0:
            last = self._waiting[-1]
            left -= len(last) + 1
            del last[-(steps * _PER_STEP) :]
            if not last:
                self._waiting.pop()

    def __getstate__(self) -> dict[str, Any]:
        return {"_waiting": []}
