"""Bounds the number and the time of a control port's unauthenticated connections, and logs refused ones.

With TLS, the handshake counts first. Then the connection itself counts until the controller accepts its first message.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec

from atoll.wire.late_timers import ReadingTimer, call_later
from atoll.wire.pending_connections import PendingConnections, Refusals

_log = logging.getLogger(__name__)

# Enough for all islands of a cluster to reconnect together, and for the many small workers of one machine.
MAX_UNAUTHENTICATED = 512
MAX_PER_ADDRESS = 256
# For the handshake, and again for the first message.
AUTHENTICATE_SECONDS = 12.0


class Accepted(Protocol):
    """An accepted connection or handshake."""

    def drop(self, reason: str) -> None:
        """End the connection at once."""


class UnauthenticatedStatistics(msgspec.Struct, frozen=True):
    """Counts since the port was opened; `open` is the current number."""

    open: int
    evicted: int
    expired: int
    refused: int


class UnauthenticatedConnections:
    """The unauthenticated connections of a port, used only on the event loop's thread."""

    def __init__(
        self,
        limit: int = MAX_UNAUTHENTICATED,
        max_per_address: int = MAX_PER_ADDRESS,
        seconds: float = AUTHENTICATE_SECONDS,
    ) -> None:
        self._pending: PendingConnections[Accepted] = PendingConnections(limit, seconds, max_per_address)
        self._seconds = seconds
        self._refusals = Refusals()
        self._expired = 0
        self._addresses: dict[Accepted, str] = {}
        self._sweep: ReadingTimer | None = None

    def add(self, connection: Accepted, address: str) -> None:
        """Add an accepted connection. Close another one if a bound is exceeded."""
        loop = asyncio.get_running_loop()
        evicted = self._pending.add(connection, loop.time(), address)
        self._addresses[connection] = address
        if evicted is not None:
            self._close(evicted, "too many connections are not authenticated yet")
        if self._sweep is None:
            self._sweep = call_later(loop, self._seconds, self._close_expired)

    def remove(self, connection: Accepted) -> None:
        """Remove a connection that is authenticated or has ended, if it is in the table."""
        self._pending.remove(connection)
        self._addresses.pop(connection, None)

    def refused(self, address: str, reason: str) -> None:
        """Log that a peer at `address` was refused, each reason at most once per minute and address."""
        line = self._refusals.line(address, reason, asyncio.get_running_loop().time())
        if line is not None:
            _log.warning("%s", line)

    def _close(self, connection: Accepted, reason: str) -> None:
        self.refused(self._addresses.pop(connection, ""), reason)
        connection.drop(reason)

    def _close_expired(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in self._pending.expired(loop.time()):
            self._expired += 1
            self._close(connection, f"it did not authenticate within {self._seconds:.0f} s")
        deadline = self._pending.next_deadline()
        self._sweep = None if deadline is None else ReadingTimer(loop, deadline, self._close_expired)

    def statistics(self) -> UnauthenticatedStatistics:
        return UnauthenticatedStatistics(len(self._pending), self._pending.evicted, self._expired, self._refusals.total)
