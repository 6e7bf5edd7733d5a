"""Who has been silent for too long. Pure: the shell brings the time."""

from __future__ import annotations

LEASE_SECONDS = 10.0
PING_SECONDS = 1.0
_JITTER_SECONDS = 0.2  # that a timer may be late


class Leases:
    """When each host was last heard of, in seconds of the shell's clock."""

    def __init__(self, seconds: float = LEASE_SECONDS) -> None:
        self.seconds = seconds
        self._heard: dict[int, float] = {}
        self._checked = 0.0

    def heard(self, host: int, now: float) -> None:
        self._heard[host] = now

    def forget(self, host: int) -> None:
        self._heard.pop(host, None)

    def expired(self, now: float) -> list[int]:
        """The hosts that nothing was heard of for too long. To be called every `PING_SECONDS`.

        The time for which the caller itself was away does not count: what was sent to it meanwhile has yet to be read.
        """
        away = now - self._checked - PING_SECONDS
        self._checked = now
        if away > _JITTER_SECONDS:
            self._heard = {host: min(now, heard + away) for host, heard in self._heard.items()}
        return [host for host, heard in self._heard.items() if now - heard > self.seconds]
