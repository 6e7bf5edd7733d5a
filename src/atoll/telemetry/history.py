"""What happened to a cluster beside gangs: losses, restarts, moves, sessions. Bounded; the oldest go first."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from atoll.cluster.lifecycle import IslandDrained, IslandFailed, IslandReady, IslandRemoved, IslandRestarted, Lifecycle
from atoll.errors import Status

MOST_EVENTS = 200

# The kinds of events, and so the values of the label `kind` of the metrics.
ISLAND_KINDS = ("ready", "failed", "back", "removed", "drained")
KINDS = (
    *ISLAND_KINDS,
    "hangs",
    "late",
    "operation",
    "refused",
    "session opened",
    "session closed",
    "session ended",
    "controller restarted",
    "controller failed",
)


class History:
    """The last events of a cluster, and how many there were of each kind. `clock()` is the controller's, in seconds."""

    def __init__(self, clock: Callable[[], float], most: int = MOST_EVENTS) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()  # by kind and island; -1 where it is about none
        self._clock = clock
        self._events: deque[dict[str, Any]] = deque(maxlen=most)
        self._next = 1

    def subscribe(self, lifecycle: Lifecycle) -> None:
        """Records what becomes of islands."""
        for kind in (IslandReady, IslandFailed, IslandRestarted, IslandRemoved, IslandDrained):
            lifecycle.subscribe(kind, self._of_island)

    def _of_island(self, event: IslandReady | IslandFailed | IslandRestarted | IslandRemoved | IslandDrained) -> None:
        match event:
            case IslandReady(island=island):
                self.record("ready", "all of its hosts are there", island)
            case IslandFailed(island=island, status=status):
                self.record("failed", status.message, island)
            case IslandRestarted(island=island):
                self.record("back", "all of its hosts are there again", island)
            case IslandRemoved(island=island, status=status):
                self.record("removed", status.message, island)
            case IslandDrained(island=island):
                self.record("drained", "nothing is on it any more", island)

    def record(self, kind: str, text: str, island: int = -1, session: int = 0, tenant: str = "") -> None:
        """Something has happened, to an island, a session, or the cluster. A `tenant` is whom it concerns alone."""
        self.counts[kind, island] += 1
        self._events.append(
            {
                "number": self._next,
                "seconds": self._clock(),
                "kind": kind,
                "text": text,
                "island": island,
                "session": session,
                "tenant": tenant,
            }
        )
        self._next += 1

    def operation(self, status: Status, text: str) -> None:
        """An operator's request is done, or refused."""
        self.record("operation" if status.ok else "refused", text if status.ok else status.message)

    def events(self, tenant: str = "") -> list[dict[str, Any]]:
        """The last ones, oldest first. With a `tenant`, those of islands and its own alone."""
        return [each for each in self._events if not tenant or each["tenant"] == tenant or each["kind"] in ISLAND_KINDS]
