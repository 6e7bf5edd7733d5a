"""Large collections that nothing needs any more, freed some items at a time.

A tuple of 65,536 objects that is dropped as a whole takes tens of milliseconds to free.

Pure, and without influence on any decision: a snapshot has none of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

# Shorter ones are freed at once.
_SMALL_ITEMS = 64
# Items per step of a flush.
_PER_STEP = 8


class Discards:
    """Collections that wait to be freed."""

    def __init__(self) -> None:
        self.waiting: list[tuple[list[Any], int]] = []  # with the objects that each item has

    def add(self, *collections: Collection[Any], size: int = 1) -> None:
        """Free the items later, if there are many. Each of them has about `size` objects.

        The caller drops its own references to the collections.
        """
        self.waiting += [(list(each), size) for each in collections if len(each) * size > _SMALL_ITEMS]

    def proceed(self, steps: int) -> None:
        """Free some items."""
        left = steps * _PER_STEP
        while self.waiting and left > 0:
            last, size = self.waiting[-1]
            count = min(len(last), max(1, left // size))
            left -= count * size + 1
            del last[len(last) - count :]
            if not last:
                self.waiting.pop()

    def __getstate__(self) -> dict[str, Any]:
        return {"waiting": []}
