"""A log of refused connections that a misconfigured or hostile peer cannot flood. Pure: the callers bring the time."""

from __future__ import annotations

from atoll.wire.unopened import address_key

QUIET_SECONDS = 60.0
MAX_ADDRESSES = 1024


class Refusals:
    """Decides which refusals are logged: one per address and `QUIET_SECONDS`, and not more than `MAX_ADDRESSES` in it.

    `total` counts all refusals.
    """

    def __init__(self) -> None:
        self.total = 0
        self._logged: dict[str, tuple[float, int]] = {}  # by address: when the last line was, and refusals since

    def line(self, address: str, reason: str, now: float) -> str | None:
        """Count a refused connection. Return the line to log, or None if its address was logged a moment ago."""
        self.total += 1
        key = address_key(address)
        logged, since = self._logged.get(key, (now - QUIET_SECONDS, 0))
        if now - logged < QUIET_SECONDS:
            self._logged[key] = logged, since + 1
            return None
        if key not in self._logged and not self._makes_room(now):
            return None
        self._logged.pop(key, None)  # the order is that of the lines
        self._logged[key] = now, 0
        more = f" ({since} more refusals of this address since the last such line)" if since else ""
        return f"a connection from {address or 'this machine'} was refused: {reason}{more}"

    def _makes_room(self, now: float) -> bool:
        while len(self._logged) >= MAX_ADDRESSES:
            oldest = next(iter(self._logged))
            if now - self._logged[oldest][0] < QUIET_SECONDS:
                return False
            del self._logged[oldest]
        return True
