"""Who has been silent for too long. Pure: the shell brings the time."""

from __future__ import annotations

LEASE_SECONDS = 10.0
PING_SECONDS = 1.0


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
        """The hosts that nothing was heard of for too long. To be called every few seconds.

        Where the caller itself was away for long, the whole machine was, and what was sent to us has yet to be read:
        nobody has expired then.
        """
        away = now - self._checked
        self._checked = now
        if away > self.seconds / 3:
            self._heard = {host: now for host in self._heard}
        return [host for host, heard in self._heard.items() if now - heard > self.seconds]
