"""Measure how long keys have been present, for deadlines in code without a clock."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Durations(Generic[Key]):
    """The times since which keys have been present without interruption."""

    def __init__(self) -> None:
        self._since: dict[Key, float] = {}

    def of(self, now: float, key: Key) -> float:
        """Return for how many seconds a key has been present; 0 if it was not at the last update."""
        return now - self._since.get(key, now)

    def update(self, now: float, present: Iterable[Key]) -> dict[Key, float]:
        """Return for how many seconds each of the keys `present` now has been present. Forget all other keys."""
        self._since = {key: self._since.get(key, now) for key in present}
        return {key: now - since for key, since in self._since.items()}
