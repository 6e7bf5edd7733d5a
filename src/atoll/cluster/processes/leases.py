"""Which peers have been silent for too long. Pure: its callers bring the time.

The time during which the caller itself did not run does not count, as when the whole machine was suspended: what was
sent to it meanwhile has yet to be read.
"""

from __future__ import annotations

LEASE_SECONDS = 10.0
LAPSED_STATUS = 75  # of a process that has ended because its lease was over (sysexits.h: EX_TEMPFAIL)
FAILED_STATUS = 70  # of a process that a bug has ended (sysexits.h: EX_SOFTWARE)
LEAST_LEASE_SECONDS = 3.0  # that a user may choose
CLIENT_LEASES = 6  # for which a client may be silent, and go on: it may be far away, or be stopped for a while
PING_SECONDS = 1.0
_JITTER_SECONDS = 0.2  # that a timer may be late


class Leases:
    """When each peer was last heard from, in seconds of the caller's clock. Peers have numbers.

    A peer may be silent for `seconds`. The owner calls `expired` every `period` seconds.
    """

    def __init__(self, seconds: float = LEASE_SECONDS, period: float = PING_SECONDS) -> None:
        self.seconds = seconds
        self.period = period
        self._renewed: dict[int, float] = {}
        self._looked = 0.0

    def renew(self, peer: int, now: float) -> None:
        self._renewed[peer] = now

    def forget(self, peer: int) -> None:
        self._renewed.pop(peer, None)

    def has(self, peer: int) -> bool:
        """Whether the peer was heard from, and is not forgotten."""
        return peer in self._renewed

    def silence(self, peer: int, now: float) -> float:
        """Seconds since the peer was heard; 0 for one that is forgotten."""
        return now - self._renewed.get(peer, now)

    def left(self, peer: int, now: float) -> float:
        """How long the peer may trust this one from now on, which tells it once in a period.

        That is the whole lease for a peer that has answered lately, and less for one that has not: where this one hears
        nothing of it any more, it ends at most a period after it was given up here.
        """
        return max(0.0, min(self.seconds, self.seconds + self.period - self.silence(peer, now)))

    def expired(self, now: float) -> list[int]:
        """The peers that have been silent for too long. To be called every `period` seconds."""
        away = now - self._looked - self.period
        self._looked = now
        if away > _JITTER_SECONDS:
            self._renewed = {peer: min(now, renewed + away) for peer, renewed in self._renewed.items()}
        return [peer for peer, renewed in self._renewed.items() if now - renewed > self.seconds]
