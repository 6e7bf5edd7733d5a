"""The bytes that a client sends to hosts: which have come early, which a launch awaits, which nobody wants.

Named by (host, feed). A worker reports each that is complete at its data port.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Waiter = TypeVar("Waiter")
Key = tuple[int, int]  # host and feed


@dataclass
class Feeds(Generic[Waiter]):
    """The feeds of one session. What awaits one is a `Waiter`."""

    early: set[Key] = field(default_factory=set)
    awaited: dict[Key, Waiter] = field(default_factory=dict)
    unwanted: set[Key] = field(default_factory=set)

    def is_here(self, key: Key) -> bool:
        """Whether it has come; whoever asks takes it."""
        if key in self.early:
            self.early.discard(key)
            return True
        return False

    def is_unwanted(self, key: Key) -> bool:
        """Whether what has come now is for nobody."""
        if key in self.unwanted:
            self.unwanted.discard(key)
            return True
        return False

    def refuse(self, key: Key) -> bool:
        """Nobody will take it. True where it has come, and is to be dropped now; else it is when it comes."""
        if self.is_here(key):
            return True
        self.awaited.pop(key, None)
        self.unwanted.add(key)
        return False

    def lose(self, hosts: set[int]) -> None:
        """What was sent to these hosts is gone."""
        for feeds in (self.early, self.unwanted):
            feeds.difference_update([key for key in feeds if key[0] in hosts])
