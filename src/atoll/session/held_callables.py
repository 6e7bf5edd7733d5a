"""The client's callables that hosts may still call, and when the client may drop them. No I/O.

A host holds the callables of a function from its compilation until it has unloaded the function.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class HeldCallables:
    """The hosts that hold callables, and the callables that the client has dropped. Safe to use from any thread.

    The callables of a function have consecutive numbers, and the first one identifies them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[int, set[int]] = {}  # hosts
        self._dropped: dict[int, tuple[int, ...]] = {}  # callables whose executable the client has dropped

    def hold(self, first: int, hosts: Iterable[int]) -> None:
        """Note that hosts may call the callables from `first` on."""
        with self._lock:
            self._holders.setdefault(first, set()).update(hosts)

    def release(self, first: int, host: int) -> None:
        """Note that a host does not call these callables any more."""
        with self._lock:
            self._holders.get(first, set()).discard(host)

    def host_lost(self, host: int) -> None:
        """Note that a host calls nothing any more."""
        with self._lock:
            for holders in self._holders.values():
                holders.discard(host)

    def drop(self, callables: tuple[int, ...]) -> None:
        """Note that the client has dropped the executable of a function that calls `callables`."""
        with self._lock:
            self._dropped[callables[0]] = callables

    def take_unheld(self) -> list[tuple[int, ...]]:
        """Forget and return the dropped callables that no host holds."""
        with self._lock:
            unheld = [each for first, each in self._dropped.items() if not self._holders.get(first)]
            for callables in unheld:
                del self._dropped[callables[0]]
                self._holders.pop(callables[0], None)
        return unheld
