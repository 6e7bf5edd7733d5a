"""Bounds for accepted connections that are not authenticated yet, and for log lines about refused connections. Pure.

Anyone who can reach a port can open such connections, so their number is bounded, per address and in total, and so is
their time. A connection that exceeds a bound replaces the oldest connection of the address that has the most. A flood
therefore displaces its own connections, and an honest peer has time to authenticate.
"""

from __future__ import annotations

import ipaddress
from typing import Generic, TypeVar

import msgspec

MAX_PENDING = 128
MAX_PER_ADDRESS = 64
OPEN_SECONDS = 10.0
# Bounds for log lines about refusals; see `Refusals`.
QUIET_SECONDS = 60.0
MAX_ADDRESSES = 1024
MAX_REASONS = 8  # per address

_IPV6_NETWORK_BITS = 64  # the smallest network that providers assign to a subscriber

Connection = TypeVar("Connection")


def address_key(host: str) -> str:
    """Return the key by which to count the connections of `host`: its IPv4 address, or the /64 network of its IPv6 one.

    If `host` is not an IP address, such as the user of a unix socket, return it unchanged.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False))


class PendingConnections(Generic[Connection]):
    """Accepted connections in order. Times are in seconds of the caller's clock."""

    def __init__(
        self, limit: int = MAX_PENDING, seconds: float = OPEN_SECONDS, max_per_address: int = MAX_PER_ADDRESS
    ) -> None:
        self._limit = limit
        self._max_per_address = max_per_address
        self._seconds = seconds
        self._since: dict[Connection, float] = {}
        self._addresses: dict[Connection, str] = {}
        self._by_address: dict[str, dict[Connection, None]] = {}
        self.evicted = 0

    def add(self, connection: Connection, now: float, address: str = "") -> Connection | None:
        """Add an accepted connection. Return the connection to close for it if a bound is exceeded."""
        key = address_key(address)
        evicted = None
        if len(self._by_address.get(key, ())) >= self._max_per_address:
            evicted = next(iter(self._by_address[key]))
        elif len(self._since) >= self._limit:
            most = max(self._by_address, key=lambda each: len(self._by_address[each]))
            evicted = next(iter(self._by_address[most]))
        if evicted is not None:
            self.remove(evicted)
            self.evicted += 1
        self._since[connection] = now
        self._addresses[connection] = key
        self._by_address.setdefault(key, {})[connection] = None
        return evicted

    def remove(self, connection: Connection) -> bool:
        """Remove a connection that has authenticated or ended. Return False if it was removed earlier."""
        if self._since.pop(connection, None) is None:
            return False
        key = self._addresses.pop(connection)
        of_address = self._by_address[key]
        del of_address[connection]
        if not of_address:
            del self._by_address[key]
        return True

    def oldest(self) -> Connection | None:
        return next(iter(self._since), None)

    def expired(self, now: float) -> list[Connection]:
        """Remove and return the connections that have taken too long, for the caller to close."""
        late = []
        for each, since in self._since.items():
            if now - since < self._seconds:
                break
            late.append(each)
        for each in late:
            self.remove(each)
        return late

    def next_deadline(self) -> float | None:
        """Return the time at which the next connection expires, if there is one."""
        oldest = self.oldest()
        return None if oldest is None else self._since[oldest] + self._seconds

    def __len__(self) -> int:
        return len(self._since)


class _Logged(msgspec.Struct):
    """The log lines about an address in the current `QUIET_SECONDS`."""

    first: float  # time of the first line
    reasons: set[int] = msgspec.field(default_factory=set)  # hashes, because a reason may be long
    since: int = 0  # number of refusals without a line


class Refusals:
    """Decides which refusals to log: each reason once per address and `QUIET_SECONDS`.

    Within that time, at most `MAX_REASONS` reasons per address and `MAX_ADDRESSES` addresses are logged, so that a
    misconfigured or hostile peer cannot flood the log. `total` counts all refusals.
    """

    def __init__(self) -> None:
        self.total = 0
        self._logged: dict[str, _Logged] = {}  # by address

    def line(self, address: str, reason: str, now: float) -> str | None:
        """Count a refused connection. Return the line to log, or None if the bounds allow none."""
        self.total += 1
        key = address_key(address)
        logged = self._logged.get(key)
        if logged is None and not self._makes_room(now):
            return None
        since = 0
        if logged is None or now - logged.first >= QUIET_SECONDS:
            since = 0 if logged is None else logged.since
            self._logged.pop(key, None)  # keep the order of the first lines
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
