"""For how long things have been in a state: deadlines for code that has no clock of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Durations(Generic[Key]):
    """Remembers since when each of some things has been there without a break."""

    def __init__(self) -> None:
        self._since: dict[Key, float] = {}

    def update(self, now: float, present: Iterable[Key]) -> dict[Key, float]:
        """These are there now; returns for how many seconds each has been. All others are forgotten."""
        self._since = {key: self._since.get(key, now) for key in present}
        return {key: now - since for key, since in self._since.items()}
