"""Which islands are to be drained since machines of theirs leave, and when a drain is asked for again. Pure.

What is on such an island may have nowhere to go for now: no other one is ready, say, or has the memory. There may be
room before the machine goes: an island comes up, a session ends. So a drain that was refused is asked for again and
again, for as long as a machine that leaves still holds a worker of the island.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from atoll.errors import Status

AGAIN_SECONDS = 3.0


class MachineDrains:
    """Drains that are asked of the controller, which answers each of them, in this order."""

    def __init__(self) -> None:
        self._asked: deque[int] = deque()  # islands
        self._refused: dict[int, tuple[float, str]] = {}  # by island: when, in the caller's time, and why

    def ask(self, island: int) -> bool:
        """Whether it is to be asked for now: not where an answer is still to come."""
        if island in self._asked:
            return False
        self._asked.append(island)
        return True

    def answered(self, status: Status, now: float) -> tuple[int, str]:
        """Which island that is about, and why it was refused: "" where it was not, or as it was before."""
        island = self._asked.popleft()
        _, before = self._refused.pop(island, (0.0, ""))
        if status.ok:
            return island, ""
        self._refused[island] = now, status.message
        return island, status.message if status.message != before else ""

    def due(self, now: float, leaving: Collection[int]) -> list[int]:
        """Those to be asked for again, of the islands that machines with workers of theirs leave."""
        self._refused = {island: refused for island, refused in self._refused.items() if island in leaving}
        late = [island for island, (at, _) in self._refused.items() if now - at >= AGAIN_SECONDS]
        return [island for island in late if self.ask(island)]
