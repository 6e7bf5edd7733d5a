"""The remains of closed sessions, released some items per flush.

A session may leave 10^5 arrays, or 65,536 programs. To release all of that at once takes hundreds of
milliseconds, in which the controller serves no other session. Small remains are released at once.

Pure, and part of the state: the order and the time of each release follow from the events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from atoll.state.session import Session
from atoll.state.turns import Turns

# Of so many items or fewer, all are released at once.
SMALL_ITEMS = 64


class _Part(NamedTuple):
    items: dict[int, Any] | list[Any]
    release: Callable[[Any], None]
    per_step: int


class Remains:
    """Items that wait to be released: for each session in the order in which it left them. Sessions take turns."""

    def __init__(self) -> None:
        self._turns: Turns[_Part] = Turns()
        self.waiting = self._turns.waiting

    def release_in_steps(
        self, session: Session, items: dict[int, Any] | list[Any], release: Callable[[Any], None], per_step: int = 1
    ) -> None:
        """Release the items, or the values of a dictionary, `per_step` of them in each step of a flush.

        The caller does not use the collection any more. `release` is a method, so that it can be pickled.
        """
        number = session.number
        if len(items) <= SMALL_ITEMS and number not in self.waiting:
            for item in items.values() if isinstance(items, dict) else items:
                release(item)
        elif items:
            self._turns.add(number, session.tenant.name, _Part(items, release, per_step))

    def left(self, kind: type[Any]) -> list[Any]:
        """Return the items of this type."""
        collections = [part.items for parts in self.waiting.values() for part in parts]
        values = (items.values() if isinstance(items, dict) else items for items in collections)
        return [item for items in values for item in items if isinstance(item, kind)]

    def proceed(self, steps: int) -> None:
        """Release as many items of one session as so many steps allow."""
        number = self._turns.next()
        if number is None:
            return
        while number in self.waiting and steps > 0:
            items, release, per_step = self.waiting[number][0]
            count = min(len(items), steps * per_step)
            for _ in range(count):
                release(items.popitem()[1] if isinstance(items, dict) else items.pop())
            steps -= -(-count // per_step)
            if not items:
                self._turns.take(number)
