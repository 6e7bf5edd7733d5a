"""The record of a lease, and the servers that store it."""

from __future__ import annotations

from typing import Protocol

import msgspec

# As in client-go's leader election: a lease that nobody has renewed for `LEASE_SECONDS` is free, and a holder that has
# not renewed it for `RENEW_SECONDS` stops acting. A holder renews every `RETRY_SECONDS`.
LEASE_SECONDS = 15.0
RENEW_SECONDS = 10.0
RETRY_SECONDS = 2.0
# In a record in place of a standby's address: the next controller with the holder's journal may replace the holder.
JOURNAL = "journal"


class LeaseRecord(msgspec.Struct, frozen=True):
    """The content of a lease on its server.

    Attributes:
      holder: The name of the holder, or "" if it has released the lease.
      transitions: How often another holder has acquired the lease.
      standby: The address of the standby that has all state of the holder, "" or JOURNAL. No other standby may replace
        the holder.
      acquired: When the holder acquired the lease, in seconds since 1970. For people only.
      renewed: When the holder last renewed the lease, in seconds since 1970. For people only.
    """

    holder: str
    transitions: int = 0
    standby: str = ""
    acquired: float = 0.0
    renewed: float = 0.0


class StoredRecord(msgspec.Struct, frozen=True):
    """A record with its version, which each write changes."""

    record: LeaseRecord
    version: str


class LeaseStore(Protocol):
    """One lease on a server. Calls block for a few seconds at most, and raise LeaseError if the server fails.

    `name` is the same for all processes that use the lease, whichever of its servers they reach.
    """

    name: str

    def read(self) -> StoredRecord | None:
        """Return the latest record, or None without a record."""
        ...

    def write(self, record: LeaseRecord, version: str) -> StoredRecord | None:
        """Store a record in place of that with this version, or of none if it is "".

        Return None if the stored record has another version. If LeaseError is raised, the record may be stored.
        """
        ...
