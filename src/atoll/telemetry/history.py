"""The recent events of a cluster: failures, restarts, migrations, sessions. Bounded; the oldest events are dropped."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from atoll.cluster.lifecycle import IslandDrained, IslandFailed, IslandReady, IslandRemoved, IslandRestarted, Lifecycle
from atoll.errors import Status
from atoll.telemetry.snapshot import Event

MAX_EVENTS = 200

# The kinds of events, which are also the values of the metrics' label `kind`.
ISLAND_KINDS = ("ready", "failed", "back", "removed", "drained")
KINDS = (
    *ISLAND_KINDS,
    "hangs",
    "late",
    "operation",
    "refused",
    "session opened",
    "session refused",
    "session closed",
    "session ended",
    "session suspended",
    "session resumed",
    "suspended",
    "controller restarted",
    "controller failed",
)
# The kinds that are logged as warnings, with what somebody may have to act upon.
WARNINGS = frozenset(("failed", "removed", "hangs", "late", "suspended", "controller failed"))


class History:
    """The last events of a cluster, and a count per kind. `clock()` returns the controller's time in seconds.

    `log(event)` is called with each event.
    """

    def __init__(self, clock: Callable[[], float], log: Callable[[Event], None], limit: int = MAX_EVENTS) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()  # per kind and island; -1 for no island
        self.working_since: dict[int, float] = {}  # by island: when all of its hosts had joined, in the clock's seconds
        self._clock = clock
        self._log = log
        self._events: deque[Event] = deque(maxlen=limit)
        self._next = 1

    def subscribe(self, lifecycle: Lifecycle) -> None:
        """Record the life cycle of islands."""
        for kind in (IslandReady, IslandFailed, IslandRestarted, IslandRemoved, IslandDrained):
            lifecycle.subscribe(kind, self._of_island)

    def _of_island(self, event: IslandReady | IslandFailed | IslandRestarted | IslandRemoved | IslandDrained) -> None:
        if isinstance(event, IslandReady | IslandRestarted):
            self.working_since[event.island] = self._clock()
        else:
            self.working_since.pop(event.island, None)
        match event:
            case IslandReady(island=island):
                self.record("ready", "all of its hosts have joined", island)
            case IslandFailed(island=island, status=status):
                self.record("failed", status.message, island)
            case IslandRestarted(island=island):
                self.record("back", "all of its hosts have joined again", island)
            case IslandRemoved(island=island, status=status):
                self.record("removed", status.message, island)
            case IslandDrained(island=island):
                self.record("drained", "its work and arrays have moved", island)

    def record(
        self, kind: str, text: str, island: int = -1, session: int = 0, tenant: str = "", actor: str = ""
    ) -> None:
        """Record an event of an island, a session or the cluster. Only `tenant`, if given, sees the event."""
        self.counts[kind, island] += 1
        event = Event(
            number=self._next,
            seconds=self._clock(),
            kind=kind,
            text=text,
            island=island,
            session=session,
            tenant=tenant,
            actor=actor,
        )
        self._events.append(event)
        self._next += 1
        self._log(event)

    def operation(self, status: Status, text: str, actor: str = "") -> None:
        """Record that a request of `actor` (see `Peer.actor`) succeeded or was refused."""
        kind = "operation" if status.ok else "refused"
        self.record(kind, text if status.ok else status.message, actor=actor)

    def events(self, tenant: str = "") -> tuple[Event, ...]:
        """Return the last events, oldest first. With a `tenant`, return only events of islands and its own."""
        return tuple(each for each in self._events if not tenant or each.tenant == tenant or each.kind in ISLAND_KINDS)
