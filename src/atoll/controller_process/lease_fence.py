"""When a controller with an external lease sends nothing: whenever it does not hold the lease."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from atoll.controller_process.takeover import LeaderFence
from atoll.leadership.lease_keeper import HeldLease
from atoll.wire.resumption.resumable_connections import ResumableConnections

_log = logging.getLogger(__name__)

# For this long a controller that seems to be cut off leaves the lease to its standby.
RELEASED_SECONDS = 6.0


class LeaseFence(LeaderFence):
    """Fences all connections of a controller while it does not hold its lease.

    `check` is called before the messages of each turn are sent, so a process that was frozen sends nothing before it
    has compared the time with that of its last renewal.

    If a controller reaches the server of the lease, but neither its standby nor most of its hosts, it releases the
    lease for `RELEASED_SECONDS`, so that a standby that reaches hosts takes over. `standby_suspicion()`
    returns the reason to assume that the standby is cut off from this controller, or "".
    """

    def __init__(
        self,
        lease: HeldLease,
        standby_suspicion: Callable[[], str],
        hosts: Callable[[], Collection[int]],
        connections: ResumableConnections,
    ) -> None:
        super().__init__(standby_suspicion, hosts, connections)
        self._lease = lease
        self._released_at: float | None = None  # when, for the present suspicion

    def end(self) -> None:
        """Continue, because the lease is needed with or without a standby."""

    def check(self) -> None:
        if not self._lease.holds():
            self._fence_all()

    def _fence_or_unfence(self, now: float) -> None:
        self._release_or_retake(now)
        if self._lease.holds():
            if self._fenced:
                _log.warning("this controller holds %s again, and sends what it has held back", self._lease.name)
            self._unfence()
        else:
            self._fence_all()

    def _release_or_retake(self, now: float) -> None:
        connections = self._connections.all()
        self._reachability.counted(now, {each.number: each.statistics().bytes_in for each in connections})
        if not self._takeover_suspicion():
            if self._released_at is not None:
                self._released_at = None
                self._lease.retake()
        elif self._released_at is not None:
            if now - self._released_at > RELEASED_SECONDS:
                self._lease.retake()
        elif self._lease.holds() and self._reachability.lost_majority(now, set(self._hosts()), self._fenced):
            self._released_at = now
            self._lease.release()

    def _fence_all(self) -> None:
        if not self._fenced:
            _log.warning("this controller does not hold %s, and sends nothing until it does", self._lease.name)
        for each in self._connections.all():
            self._fenced.add(each.number)
            each.fence()  # again, because its peer may have resumed it since
