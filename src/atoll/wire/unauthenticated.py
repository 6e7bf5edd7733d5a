"""The connections of a control port that are not authenticated yet: how many, for how long, and what is logged of them.

A connection is in the table from the moment its socket is accepted: first its TLS handshake, if the port has TLS, then
the connection itself until its first message was accepted.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from atoll.wire.pending_connections import PendingConnections
from atoll.wire.refusals import Refusals

_log = logging.getLogger(__name__)

# The islands of a cluster restart together, and so do the hosts of a machine with many small workers.
MAX_UNAUTHENTICATED = 512
MAX_PER_ADDRESS = 256
# For the handshake, and again for the first message.
AUTHENTICATE_SECONDS = 12.0


class Accepted(Protocol):
    """What is closed if it takes too long, or if there are too many."""

    def drop(self, reason: str) -> None:
        """End the connection at once."""


@dataclass(frozen=True)
class UnauthenticatedStatistics:
    """`open` is current; the other counts are since the port was opened."""

    open: int
    evicted: int
    expired: int
    refused: int


class UnauthenticatedConnections:
    """The table of a port. All methods belong to the event loop's thread."""

    def __init__(
        self,
        most: int = MAX_UNAUTHENTICATED,
        most_per_address: int = MAX_PER_ADDRESS,
        seconds: float = AUTHENTICATE_SECONDS,
    ) -> None:
        self._pending: PendingConnections[Accepted] = PendingConnections(most, seconds, most_per_address)
        self._most_per_address = most_per_address
        self._seconds = seconds
        self._refusals = Refusals()
        self._expired = 0
        self._addresses: dict[Accepted, str] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def add(self, connection: Accepted, address: str) -> None:
        """Add an accepted connection; close another one if there are too many."""
        loop = asyncio.get_running_loop()
        evicted = self._pending.add(connection, loop.time(), address)
        self._addresses[connection] = address
        if evicted is not None:
            self._close(evicted, "too many connections are not authenticated yet")
        if self._sweep is None:
            self._sweep = loop.call_later(self._seconds, self._close_expired)

    def remove(self, connection: Accepted) -> None:
        """The connection is authenticated, or has ended. Does nothing if it is not in the table."""
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
        self._sweep = None if deadline is None else loop.call_at(deadline, self._close_expired)

    def statistics(self) -> UnauthenticatedStatistics:
        return UnauthenticatedStatistics(len(self._pending), self._pending.evicted, self._expired, self._refusals.total)
