"""A log of refused connections that a misconfigured or hostile peer cannot flood. Pure: the callers bring the time."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.wire.pending_connections import address_key

QUIET_SECONDS = 60.0
MAX_ADDRESSES = 1024
MAX_REASONS = 8  # of one address


@dataclass
class _Logged:
    """The lines about an address in the current `QUIET_SECONDS`."""

    first: float  # when it was logged
    reasons: set[int] = field(default_factory=set)  # by hash: a reason may be long
    since: int = 0  # refusals without a line


class Refusals:
    """Decides which refusals are logged: each reason once per address and `QUIET_SECONDS`.

    In that time, at most `MAX_REASONS` of an address are logged, and at most `MAX_ADDRESSES` addresses. `total` counts
    all refusals.
    """

    def __init__(self) -> None:
        self.total = 0
        self._logged: dict[str, _Logged] = {}  # by address

    def line(self, address: str, reason: str, now: float) -> str | None:
        """Count a refused connection. Return the line to log, or None if such a line was logged a moment ago."""
        self.total += 1
        key = address_key(address)
        logged = self._logged.get(key)
        if logged is None and not self._makes_room(now):
            return None
        since = 0
        if logged is None or now - logged.first >= QUIET_SECONDS:
            since = 0 if logged is None else logged.since
            self._logged.pop(key, None)  # the order is that of the first lines
            logged = self._logged[key] = _Logged(now)
        if hash(reason) in logged.reasons or len(logged.reasons) >= MAX_REASONS:
            logged.since += 1
            return None
        logged.reasons.add(hash(reason))
        more = f" ({since} more refusals of this address since the last such line)" if since else ""
        return f"a connection from {address or 'this machine'} was refused: {reason}{more}"

    def _makes_room(self, now: float) -> bool:
        while len(self._logged) >= MAX_ADDRESSES:
            oldest = next(iter(self._logged))
            if now - self._logged[oldest].first < QUIET_SECONDS:
                return False
            del self._logged[oldest]
        return True
