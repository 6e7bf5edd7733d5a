"""The launch window: how much of a session may be launched and not yet acknowledged.

A launch takes credits, which the controller returns once the launch has ended on its devices. The window refuses
nothing: a front end asks it, and holds its client back while it is full.
"""

from __future__ import annotations

from collections.abc import Callable


class LaunchWindow:
    """`size` credits, of which `in_flight` are taken."""

    __slots__ = ("_waiting", "in_flight", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.in_flight = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    @property
    def is_full(self) -> bool:
        return self.in_flight >= self.size

    def take(self, credits: int) -> None:
        self.in_flight += credits

    def give_back(self, credits: int) -> None:
        """Credits return. Negative: the controller has launched something on the session's account."""
        self.in_flight -= credits
        if self._waiting:
            self._wake()

    def limit_for(self, credits: int) -> int:
        """How many credits may be in flight for a launch of so many to fit; one larger than the window goes alone."""
        return max(0, self.size - credits)

    def when_at_most(self, credits: int, call: Callable[[], None]) -> None:
        """Calls once, as soon as at most so many credits are in flight; now where that is so."""
        if self.in_flight <= credits:
            call()
        else:
            self._waiting.append((credits, call))

    def _wake(self) -> None:
        ready = [call for credits, call in self._waiting if self.in_flight <= credits]
        self._waiting = [each for each in self._waiting if self.in_flight > each[0]]
        for call in ready:
            call()
