"""When a standby takes over, and when the controller that it follows has to expect that.

The hosts decide. A standby cannot distinguish a controller that has ended from one that it cannot reach, so it takes
over once more than half of the hosts have tried to resume their connections at the standby, which they do only if they
cannot reach the controller. From then on they obey only the later term, and too few hosts are left for the earlier
controller if it still runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping

from atoll.wire.resumption.resumable_connections import ResumableConnections

# A controller that is silent for this long may have ended. It sends two heartbeats per second.
LEASE_SECONDS = 2.0
# How long a host's attempt to resume counts. If it reaches no controller, it tries again within a few seconds.
RESUME_ATTEMPT_SECONDS = 5.0
# After this, the state of a standby is too old to continue from: the controller has withdrawn its address by then.
KNOWS_SECONDS = 20.0
# Between the terms of a standby and of the earlier controller, which may have restarted without the standby's notice.
_TERMS = 1000
_LOOK_SECONDS = 0.5
_FENCED_LOOK_SECONDS = 0.1  # while messages to peers are held back


class Takeover:
    """A standby's knowledge of the controller and its hosts. Pure: callers pass times in seconds of one clock."""

    def __init__(self) -> None:
        self._last_received = -math.inf
        self._is_lost = True
        self._is_fenced = False
        self._resume_attempts: dict[int, float] = {}  # by connection: when

    def received(self, now: float) -> None:
        """Record that something has arrived from the controller."""
        self._last_received, self._is_lost = now, False

    def lost(self) -> None:
        """Record that the connection to the controller has ended."""
        self._is_lost = True

    def on_resume_attempt(self, now: float, connection: int) -> None:
        """Record that a peer has tried to resume its connection here."""
        self._resume_attempts[connection] = now

    def fenced(self, is_fenced: bool) -> None:
        """Record whether the controller sends nothing to its peers, because it does not hold its lease."""
        self._is_fenced = is_fenced

    def may_claim(self, now: float) -> bool:
        """Whether to acquire the external lease: the controller is lost, and a peer has tried to resume here.

        The lease, and not the number of peers, decides who continues.
        """
        is_lost = self._is_lost or self._is_fenced or now - self._last_received >= LEASE_SECONDS
        return is_lost and any(now - each <= RESUME_ATTEMPT_SECONDS for each in self._resume_attempts.values())

    def is_due(self, now: float, hosts: Collection[int]) -> bool:
        """Whether to take over now. `hosts` are the connections of the controller's hosts."""
        silent = now - self._last_received
        if silent > KNOWS_SECONDS or not (self._is_lost or silent >= LEASE_SECONDS):
            return False
        there = [each for each in hosts if now - self._resume_attempts.get(each, -math.inf) <= RESUME_ATTEMPT_SECONDS]
        return 2 * len(there) > len(hosts)


def next_term(term: int) -> int:
    """Return the term of a standby that takes over, which is above those of restarts of the controller of `term`."""
    return (term // _TERMS + 1) * _TERMS


def first_term(transitions: int) -> int:
    """Return the first term of a controller that has acquired a lease with these transitions."""
    return max(1, transitions * _TERMS)


def transitions_of(term: int) -> int:
    """Return the transitions of the lease under which the controller of `term` has begun. See `first_term`."""
    return term // _TERMS


class Reachability:
    """Which connections of a controller are alive. Pure: callers pass times in seconds of one clock."""

    def __init__(self) -> None:
        self._received: dict[int, tuple[int, float]] = {}  # by connection: received bytes, and when the last arrived

    def counted(self, now: float, received: Mapping[int, int]) -> None:
        """Update the count of received bytes per connection. Forget connections that are not in `received`."""
        latest = {}
        for connection, nbytes in received.items():
            before = self._received.get(connection)
            latest[connection] = before if before is not None and before[0] == nbytes else (nbytes, now)
        self._received = latest

    def is_reachable(self, now: float, connection: int) -> bool:
        _, when = self._received.get(connection, (0, -math.inf))
        return now - when <= LEASE_SECONDS

    def lost_majority(self, now: float, hosts: Collection[int], fenced: Collection[int]) -> bool:
        """Return whether more than half of the hosts are silent. The hosts that are `fenced` do not count as silent."""
        silent = [each for each in hosts if each not in fenced and not self.is_reachable(now, each)]
        return 2 * len(silent) > len(hosts)


class LeaderFence:
    """Fences the connections of a controller whose standby may have taken over.

    A standby takes over with more than half of the hosts (`Takeover`). A controller that has lost its standby and half
    of the hosts may be cut off from all of them, and still reach some peers, such as an engine on its own machine. The
    standby knows nothing of messages to these peers, so they would have to be undone. The controller therefore
    continues to decide, but holds its messages back until the standby or enough hosts reply, or the standby can no
    longer have taken over. It continues to ping hosts that are silent.

    `takeover_suspicion()` returns the reason for the suspicion, or "". `hosts()` returns the connections of the hosts
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

    @property
    def is_active(self) -> bool:
        return bool(self._fenced)

    def begin(self) -> None:
        if self._looks is None:
            self._look()

    def check(self) -> None:
        """Fence before the messages of a turn, if that cannot wait until the next look."""

    def end(self) -> None:
        """Stop, and unfence all connections, because there is no standby and no suspicion."""
        self.stop()
        self._unfence()
        self._reachability = Reachability()

    def stop(self) -> None:
        """Stop without unfencing, because another controller has taken over."""
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
