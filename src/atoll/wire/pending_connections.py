"""Connections that were accepted and are not authenticated yet. Pure: the callers bring the time.

Anybody who reaches a port can make such connections, so their number is bounded, per address and in total, and so is
their time. A connection that exceeds a bound takes the place of the oldest one of the address that has the most: a
flood displaces its own connections, and an honest peer authenticates at once.
"""

from __future__ import annotations

import ipaddress
from typing import Generic, TypeVar

MAX_PENDING = 128
MAX_PER_ADDRESS = 64
OPEN_SECONDS = 10.0

_IPV6_NETWORK_BITS = 64  # one subscriber has at least so many addresses

Connection = TypeVar("Connection")


def address_key(host: str) -> str:
    """Return the key under which the connections of `host` count: its address, or the /64 network of an IPv6 address.

    A `host` that is no IP address, such as the user of a unix socket, is its own key.
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
    """The connections, in the order in which they were accepted. Times are in seconds of the caller's clock."""

    def __init__(
        self, most: int = MAX_PENDING, seconds: float = OPEN_SECONDS, most_per_address: int = MAX_PER_ADDRESS
    ) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._seconds = seconds
        self._since: dict[Connection, float] = {}
        self._addresses: dict[Connection, str] = {}
        self._by_address: dict[str, dict[Connection, None]] = {}
        self.evicted = 0

    def add(self, connection: Connection, now: float, address: str = "") -> Connection | None:
        """Add an accepted connection. Return the connection to close for it if a bound is exceeded."""
        key = address_key(address)
        evicted = None
        if len(self._by_address.get(key, ())) >= self._most_per_address:
            evicted = next(iter(self._by_address[key]))
        elif len(self._since) >= self._most:
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
        """Remove a connection that has authenticated or ended. Return False if it was to be closed before that."""
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
