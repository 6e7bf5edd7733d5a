"""The state of a lease as one process knows it, and the decision to acquire it, without requests and without a clock.

The rules are those of client-go's leader election. All writes compare versions, so only one of several processes
acquires the lease. A process measures times only with its own clock:

- A holder counts from the time before it sends a renewal.
- Others count from the time at which they first receive a version.

So a holder stops acting `LEASE_SECONDS - RENEW_SECONDS` before another process can acquire the lease, unless their
clocks differ by more than this in that time.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Mapping

import msgspec

from atoll.cluster.state_machine import StateMachine
from atoll.leadership.lease_record import LEASE_SECONDS, RENEW_SECONDS, LeaseRecord, StoredRecord


class LeaseState(enum.Enum):
    """The state of a lease as one process knows it."""

    OBSERVED = enum.auto()  # this process does not hold it
    HELD = enum.auto()  # this process holds it, as long as it renews it
    RELEASED = enum.auto()  # this process has released it, and acquires it again if nobody else does
    LOST = enum.auto()  # another process has acquired it from this one


_S = LeaseState
TRANSITIONS: Mapping[LeaseState, frozenset[LeaseState]] = {
    _S.OBSERVED: frozenset({_S.HELD}),
    _S.HELD: frozenset({_S.RELEASED, _S.LOST}),
    _S.RELEASED: frozenset({_S.HELD, _S.LOST}),
    _S.LOST: frozenset(),
}


class Claim(msgspec.Struct, frozen=True):
    """The conditions on which a process acquires a lease.

    Attributes:
      transitions: The transitions that the record must have, because the state of this process is that of the holder
        at that time; None if this process begins a cluster.
      standby: The address that the record must name, if this process is a standby; None for other processes.
    """

    transitions: int | None = None
    standby: str | None = None


class Election(StateMachine[LeaseState]):
    """A lease as the process `holder` knows it.

    Callers pass times in seconds of one clock. `wall()` returns seconds since 1970.
    """

    transitions = TRANSITIONS

    def __init__(self, holder: str, wall: Callable[[], float] = time.time) -> None:
        self.state = LeaseState.OBSERVED
        self._holder = holder
        self._wall = wall
        self._stored: StoredRecord | None = None
        self._written: LeaseRecord | None = None  # the last one of this process
        self._seen = -math.inf  # when the present version arrived first
        self._has_read = False
        self._renewed = -math.inf  # when the last successful renewal was sent

    @property
    def record(self) -> LeaseRecord | None:
        """The latest record that this process knows."""
        return self._stored.record if self._stored is not None else None

    @property
    def version(self) -> str:
        """The version of the latest record, or "" without a record."""
        return self._stored.version if self._stored is not None else ""

    def holds(self, now: float) -> bool:
        """Whether this process holds the lease and has renewed it in time."""
        return self.state is LeaseState.HELD and now - self._renewed < RENEW_SECONDS

    def is_own(self) -> bool:
        """Whether the latest record names this process as the holder."""
        return self.record is not None and self.record.holder == self._holder

    def can_claim(self, now: float, claim: Claim) -> bool:
        """Whether this process can acquire the lease, which it does not hold."""
        record = self.record
        if not self._has_read:
            return False
        if record is None:
            return claim.standby is None
        if self.is_own():  # it was acquired by an earlier process of this name, or by a write whose reply was lost
            return True
        if claim.transitions not in (None, record.transitions) or claim.standby not in (None, record.standby):
            return False
        return not record.holder or now - self._seen >= LEASE_SECONDS

    # ---- what to write

    def acquisition(self, claim: Claim) -> LeaseRecord:
        """Return the record with which this process acquires the lease."""
        record, now = self.record, self._wall()
        if record is None:
            transitions = 0 if claim.transitions is None else claim.transitions + 1
        else:
            transitions = record.transitions + (not self.is_own())
        return LeaseRecord(self._holder, transitions, "", now, now)

    def renewal(self, standby: str) -> LeaseRecord:
        """Return the record with which this process renews the lease, or acquires it again after it has released it."""
        return msgspec.structs.replace(self._own, holder=self._holder, standby=standby, renewed=self._wall())

    def release(self, standby: str) -> LeaseRecord:
        """Return the record with which this process releases the lease, which it does not hold from now on.

        Of all standbys, only the one at `standby` can acquire the lease then, or none if it is "".
        The release may succeed without a reply, and another process may then hold the lease. So only a renewal that
        is sent later counts.
        """
        self._renewed = -math.inf
        return msgspec.structs.replace(self._own, holder="", standby=standby, renewed=self._wall())

    @property
    def _own(self) -> LeaseRecord:
        """The last record that this process has written."""
        assert self._written is not None
        return self._written

    # ---- replies

    def on_read(self, now: float, stored: StoredRecord | None) -> None:
        """Handle the reply to a read, which arrived at `now`."""
        version = stored.version if stored is not None else ""
        if not self._has_read or version != self.version:
            self._seen = now
        self._has_read, self._stored = True, stored
        if self.state in (LeaseState.HELD, LeaseState.RELEASED) and stored is not None:
            record = stored.record
            if record.transitions != self._own.transitions or record.holder not in ("", self._holder):
                self.enter(LeaseState.LOST)

    def on_written(self, sent: float, stored: StoredRecord) -> None:
        """Handle the success of a write of this process, which was sent at `sent`."""
        self._has_read, self._stored, self._seen = True, stored, sent
        self._written = stored.record
        if not stored.record.holder:
            if self.state is not LeaseState.RELEASED:  # otherwise the record names another standby
                self.enter(LeaseState.RELEASED)
            return
        self._renewed = sent
        if self.state is not LeaseState.HELD:
            self.enter(LeaseState.HELD)
