"""The bytes that a client sends to hosts: those that arrived early, those that a launch awaits, those to be dropped.

Named by (host, feed). A worker reports each that is complete at its data port.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    def claim(self, key: Key) -> bool:
        """Takes a feed that has arrived early; False where it has not."""
        if key in self.early:
            self.early.discard(key)
            return True
        return False

    def claim_unwanted(self, key: Key) -> bool:
        """Whether the feed that has just arrived was refused before."""
        if key in self.unwanted:
            self.unwanted.discard(key)
            return True
        return False

    def refuse(self, key: Key) -> bool:
        """No launch will take it. True where it has arrived, and is to be dropped now; else it is when it arrives."""
        if self.claim(key):
            return True
        self.awaited.pop(key, None)
        self.unwanted.add(key)
        return False

    def lose(self, hosts: set[int]) -> None:
        """Forget what was sent to these hosts."""
        for feeds in (self.early, self.unwanted):
            feeds.difference_update([key for key in feeds if key[0] in hosts])

    def lost(self, hosts: set[int], resent: Iterable[Key], unsent: Iterable[int]) -> list[tuple[Key, Waiter]]:
        """Return the feeds that launches await of these hosts and that are lost.

        The client's proxy sends the feeds in `resent` to the restarted hosts, and those in `unsent` sooner or later.
        """
        coming, later = {key for key in resent if key[0] in hosts}, set(unsent)
        self.unwanted = {key for key in self.unwanted if key[0] not in hosts or key in coming or key[1] in later}
        self.unwanted.update(key for key in coming if key not in self.awaited and key not in self.early)
        return [
            (key, waiter)
            for key, waiter in self.awaited.items()
            if key[0] in hosts and key not in coming and key[1] not in later
        ]
