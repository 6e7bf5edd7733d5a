"""When a controller falls silent: its standby may have taken over, and too few of its hosts are heard to exclude that.

A standby takes over with more than half of the hosts (`takeover`). A controller that hears neither its standby nor as
many hosts as that one would lack may be cut off from all of them, and still reach some peers, such as an engine on its
own machine. What it said to them would have to be undone: the standby knows nothing of it. So it goes on deciding, and
keeps what it has to say until the standby answers, enough hosts do, or the standby cannot have taken over any more. The
hosts that it does not hear it goes on asking for signs of life.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping

from atoll.controller_process.takeover import LEASE_SECONDS
from atoll.wire.resumption.resumable_connections import ResumableConnections

_LOOK_SECONDS = 0.5
_FENCED_LOOK_SECONDS = 0.1  # while peers wait for what is kept


class Reachability:
    """Which connections of a controller are alive. Pure: the caller passes times, in seconds of one clock."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[int, float]] = {}  # bytes, and when the last came, by connection

    def counted(self, now: float, received: Mapping[int, int]) -> None:
        """Update the count of received bytes per connection. Forget connections that are not in `received`."""
        heard = {}
        for connection, nbytes in received.items():
            before = self._heard.get(connection)
            heard[connection] = before if before is not None and before[0] == nbytes else (nbytes, now)
        self._heard = heard

    def is_reachable(self, now: float, connection: int) -> bool:
        _, when = self._heard.get(connection, (0, -math.inf))
        return now - when <= LEASE_SECONDS

    def lost_majority(self, now: float, hosts: Collection[int], fenced: Collection[int]) -> bool:
        """Return whether more than half of the hosts are silent. The hosts that are `fenced` do not count as silent."""
        silent = [each for each in hosts if each not in fenced and not self.is_reachable(now, each)]
        return 2 * len(silent) > len(hosts)


class LeaderFence:
    """Fences the connections of a controller whose standby may have taken over.

    `takeover_suspicion()` returns the reason for that suspicion, or "". `hosts()` returns the connections of the hosts
    that decide about a takeover. The fence checks both from `begin` to `end`.
    """

    def __init__(
        self,
        takeover_suspicion: Callable[[], str],
        hosts: Callable[[], Collection[int]],
        connections: ResumableConnections,
    ) -> None:
        self._takeover_suspicion = takeover_suspicion
        self._hosts = hosts
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._reachability = Reachability()
        self._fenced: set[int] = set()
        self._looks: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        if self._looks is None:
            self._look()

    def end(self) -> None:
        """Stop, and unfence all connections: there is no standby and no suspicion."""
        self.stop()
        self._unfence()
        self._reachability = Reachability()

    def stop(self) -> None:
        """Stop without unfencing: another controller has taken over."""
        if self._looks is not None:
            self._looks.cancel()
            self._looks = None

    def _look(self) -> None:
        self._fence_or_unfence(self._loop.time())
        self._looks = self._loop.call_later(_FENCED_LOOK_SECONDS if self._fenced else _LOOK_SECONDS, self._look)

    def _fence_or_unfence(self, now: float) -> None:
        reachability, hosts = self._reachability, set(self._hosts())
        connections = self._connections.all()
        reachability.counted(now, {each.number: each.statistics().bytes_in for each in connections})
        if not self._takeover_suspicion() or not reachability.lost_majority(now, hosts, self._fenced):
            self._unfence()
            return
        for each in connections:
            if each.number not in self._fenced and (
                each.number not in hosts or reachability.is_reachable(now, each.number)
            ):
                self._fenced.add(each.number)
                each.fence()

    def _unfence(self) -> None:
        fenced, self._fenced = self._fenced, set()
        for each in self._connections.all() if fenced else ():
            if each.number in fenced:
                each.unfence()
