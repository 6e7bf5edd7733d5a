"""Detect peers that have been silent for too long. Pure: callers pass the time.

Time during which the caller itself did not run, for example because the machine was suspended, does not count: it has
not read yet what peers sent meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

LEASE_SECONDS = 10.0
LAPSED_STATUS = 75  # exit status of a process whose lease expired (sysexits.h: EX_TEMPFAIL)
FAILED_STATUS = 70  # exit status of a process that a bug ended (sysexits.h: EX_SOFTWARE)
MIN_LEASE_SECONDS = 3.0  # minimum for the setting
CLIENT_LEASES = 6  # leases for which a client may be silent: it may be far away, or be stopped for a while
PING_SECONDS = 1.0
_JITTER_SECONDS = 0.2  # delay of a timer that is not counted as time without running


class Leases:
    """The leases of peers, by number. Times are in seconds of the caller's clock.

    A peer may be silent for `seconds`. The owner calls `renew` at each message, and `expired` every `period` seconds.
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
        """Return whether the peer has a lease, expired or not."""
        return peer in self._renewed

    def silence(self, peer: int, now: float) -> float:
        """Return the seconds since the last message of the peer; 0 for an unknown peer."""
        return now - self._renewed.get(peer, now)

    def heard_since(self, when: float) -> set[int]:
        """Return the peers that have sent a message at that time or later."""
        return {peer for peer, renewed in self._renewed.items() if renewed >= when}

    def left(self, peer: int, now: float) -> float:
        """Return for how long the peer may trust this process; the caller sends it that time once per `period`.

        This is the whole lease if the peer has answered recently, and less if not. So a peer whose messages are lost
        ends at most one period after its lease has expired here.
        """
        return max(0.0, min(self.seconds, self.seconds + self.period - self.silence(peer, now)))

    def min_left(self, peers: Iterable[int], now: float) -> float:
        """Return for how long all of these peers may trust this process: see `left`."""
        renewed = self._renewed
        silence = now - min([renewed.get(peer, now) for peer in peers])
        return max(0.0, min(self.seconds, self.seconds + self.period - silence))

    def expired(self, now: float) -> list[int]:
        """Return the peers that have been silent for too long. Call this every `period` seconds."""
        away = now - self._looked - self.period
        self._looked = now
        if away > _JITTER_SECONDS:
            self._renewed = {peer: min(now, renewed + away) for peer, renewed in self._renewed.items()}
        return [peer for peer, renewed in self._renewed.items() if now - renewed > self.seconds]
