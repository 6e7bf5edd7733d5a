"""A thread that acquires, renews and releases a lease, so that requests to its server never delay the controller.

The controller asks `holds()` before it sends anything. The answer depends only on the clock and on the last successful
renewal: it needs no request and no turn of the thread. So it is right also if the process was frozen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from atoll.errors import LeaseError
from atoll.leadership.election import Claim, Election, LeaseState
from atoll.leadership.lease_record import JOURNAL, LEASE_SECONDS, RETRY_SECONDS, LeaseRecord, LeaseStore
from atoll.retries import Reasons

_log = logging.getLogger(__name__)

_CLAIM_SECONDS = 0.5  # between two requests while this process waits for the lease
_AGAIN_SECONDS = 0.1  # after another version was found
# For the first acquisition: another holder may have ended just now, and the server may be starting.
ACQUIRE_SECONDS = LEASE_SECONDS + 15.0
_END_SECONDS = 5.0  # for a request in progress when this process ends
# For the release of the lease when the cluster ends. Afterwards the lease expires.
RELEASE_SECONDS = 3.0
_RELEASE_AGAIN_SECONDS = 0.5


def boot_seconds() -> float:
    """Return the time since the machine was booted. It also passes while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class LeaseTakenError(LeaseError):
    """The lease that this process held was acquired by another process.

    `transitions` is the number of transitions in the latest record of the lease.
    """

    def __init__(self, message: str, transitions: int) -> None:
        super().__init__(message)
        self.transitions = transitions


class HeldLease(Protocol):
    """A lease as the controller uses it."""

    @property
    def name(self) -> str:
        """The name of the lease, with its kind."""
        ...

    @property
    def transitions(self) -> int:
        """The transitions of the latest record, or -1 without a record."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether another process has acquired the lease from this one."""
        ...

    @property
    def named_standby(self) -> str:
        """The standby that the record on the server names, if this process holds the lease."""
        ...

    def holds(self) -> bool:
        """Whether this process may act now."""
        ...

    def name_standby(self, address: str) -> None:
        """Let only the standby at `address` acquire the lease, or none if it is ""."""
        ...

    def release(self) -> None:
        """Stop holding the lease at once, and let the named standby acquire it."""
        ...

    def retake(self) -> None:
        """Acquire the lease again after `release`, unless another process has it."""
        ...


class LeaseKeeper:
    """Keeps one lease for this process, which is known as `holder`. Methods are thread-safe.

    Without `start`, the requests are made by calls of `step`.
    """

    def __init__(
        self,
        store: LeaseStore,
        holder: str,
        clock: Callable[[], float] = boot_seconds,
    ) -> None:
        self._store = store
        self._on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._election = Election(holder)
        self._lock = threading.Lock()  # of the following goals, which other threads change
        self._claim: Claim | None = None
        self._is_claiming = False  # a write that acquires the lease may succeed, or has succeeded
        self._standby = ""
        self._wants_lease = True
        self._problems = Reasons(_log)
        self._problem = ""
        self._wake = threading.Event()
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    # ---- properties

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def state(self) -> LeaseState:
        return self._election.state

    @property
    def is_lost(self) -> bool:
        return self._election.state is LeaseState.LOST

    @property
    def transitions(self) -> int:
        record = self._election.record
        return record.transitions if record is not None else -1

    @property
    def named_standby(self) -> str:
        record = self._election.record
        return record.standby if record is not None and self.state is LeaseState.HELD else ""

    def holds(self) -> bool:
        return self._wants_lease and self._election.holds(self._clock())

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change()` in the thread that makes the requests when the state has changed, and no earlier one."""
        self._on_change = on_change

    # ---- goals

    def claim(self, claim: Claim) -> None:
        """Acquire the lease as soon as these conditions hold."""
        with self._lock:
            self._claim = claim
        self._wake.set()

    @property
    def may_be_acquired(self) -> bool:
        """Whether this process may have acquired the lease, so that its claim cannot be withdrawn."""
        with self._lock:
            return self._is_claiming

    def withdraw(self) -> bool:
        """Do not acquire the lease anymore. Return False if this process may have acquired it."""
        with self._lock:
            if self._is_claiming:
                return False
            self._claim = None
            return True

    def name_standby(self, address: str) -> None:
        with self._lock:
            if address == self._standby:
                return
            self._standby = address
        self._wake.set()

    def leave(self) -> None:
        """Leave the cluster, when this process ends, to the named standby, or else to the holder's journal."""
        if not self._standby:
            self.name_standby(JOURNAL)

    def release(self) -> None:
        self._wants_lease = False
        self._wake.set()

    def retake(self) -> None:
        with self._lock:
            if self._wants_lease:
                return
            self._wants_lease = True
        self._wake.set()

    # ---- requests

    def acquire(
        self, claim: Claim, seconds: float = ACQUIRE_SECONDS, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        """Acquire the lease before `start`. Block until this process holds it.

        Raise LeaseTakenError if another process has held it since the time of the claim, and LeaseError if another
        process renews it, if this process does not acquire it within `seconds`, or if `close` is called.
        """
        self._claim = claim
        deadline = self._clock() + seconds
        other: tuple[str, str] | None = None  # the holder and the version that were seen first
        while True:
            pause = self.step()
            if self.state is LeaseState.HELD:
                return
            record = self._election.record
            if record is not None and not self._election.is_own():
                if claim.transitions is not None and record.transitions > claim.transitions:
                    raise LeaseTakenError(self._taken(record), record.transitions)
                seen = (record.holder, self._election.version)
                other = other if other is not None and other[0] == record.holder else seen
                if record.holder and seen != other:
                    raise LeaseError(
                        f"{self.name} is held by {record.holder}, which renews it: end that cluster, or give this one "
                        "another --leader-lease"
                    )
            if self._stops or self._clock() + pause > deadline:
                raise LeaseError(self._problem or f"{self.name} was not acquired within {seconds:.0f} s")
            sleep(pause)

    def advance(self, transitions: int) -> None:
        """Raise the transitions to this number at least, before `start`. Raise LeaseError if that fails."""
        if self.transitions < transitions:
            self._write(msgspec.structs.replace(self._election.renewal(""), transitions=transitions))
            if self.transitions < transitions:
                raise LeaseError(f"{self.name} has been changed by another process")

    def _taken(self, record: LeaseRecord) -> str:
        holder = record.holder or "another controller, which has released it,"
        return (
            f"{holder} has acquired {self.name} since, so the journal here is out of date: start a --standby of the "
            "present controller, or begin another cluster without --continue"
        )

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        pause = 0.0
        while not self._stops:
            self._wake.wait(pause)
            self._wake.clear()
            if not self._stops:
                pause = self.step()

    def step(self) -> float:
        """Make the next requests. Return the seconds until the next step."""
        before = self.state
        try:
            pause = self._step()
            self._problems.solved()
            self._problem = ""
        except LeaseError as error:
            self._problem = str(error)
            self._problems.log(f"{error}; trying again every {RETRY_SECONDS:.0f} s")
            pause = RETRY_SECONDS
        if self.state is not before:
            self._report()
            self._on_change()
        return pause

    def _step(self) -> float:
        match self.state:
            case LeaseState.LOST:
                return threading.TIMEOUT_MAX
            case LeaseState.OBSERVED:
                return self._observe()
            case LeaseState.RELEASED if not self._wants_lease:
                self._read()
                return _CLAIM_SECONDS
        with self._lock:  # so that `retake` comes before the decision to release, or after its effect on `holds`
            decide = self._election.renewal if self._wants_lease else self._election.release
            record = decide(self._standby)
        return self._write(record)

    def _observe(self) -> float:
        self._read()
        with self._lock:
            claim, now = self._claim, self._clock()
            self._is_claiming = claim is not None and self._election.can_claim(now, claim)
        if claim is None or not self._is_claiming:
            return RETRY_SECONDS if claim is None else _CLAIM_SECONDS
        pause = self._write(self._election.acquisition(claim))
        # After an error in the write, the next read shows whether it has succeeded. A server may have applied it and
        # refused a repetition of the request: then the record is this process's.
        with self._lock:
            self._is_claiming = self.state is not LeaseState.OBSERVED or self._election.is_own()
        return pause

    def _read(self) -> None:
        stored = self._store.read()
        self._election.on_read(self._clock(), stored)

    def _write(self, record: LeaseRecord) -> float:
        sent = self._clock()  # before the request, because others count from the time at which they see the record
        stored = self._store.write(record, self._election.version)
        if stored is None:
            self._read()
            return _AGAIN_SECONDS
        self._election.on_written(sent, stored)
        return RETRY_SECONDS

    def _report(self) -> None:
        record = self._election.record
        match self.state:
            case LeaseState.HELD:
                _log.info("this process holds %s, transition %d", self.name, self.transitions)
            case LeaseState.RELEASED:
                _log.warning("this process has released %s, because it may be cut off", self.name)
            case LeaseState.LOST:
                _log.warning("%s has acquired %s", (record and record.holder) or "another process", self.name)

    def close(self, *, release: bool, sleep: Callable[[float], object] = time.sleep) -> None:
        """End the thread. If `release`, let others acquire the lease at once.

        Of all standbys, only the named one can acquire it. If the server fails for `RELEASE_SECONDS`, the lease expires
        by itself, and its record still names the standby.
        """
        self._stops = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)
        if not release or self._thread.is_alive():
            return
        deadline = self._clock() + RELEASE_SECONDS
        while self._must_release():
            problem = "it is being changed by other processes"
            try:
                self._write(self._election.release(self._standby))
            except LeaseError as error:
                problem = str(error)
            if self._must_release():
                if self._clock() >= deadline:
                    _log.warning(
                        "cannot release %s, which expires in %.0f s: %s", self._store.name, LEASE_SECONDS, problem
                    )
                    return
                sleep(_RELEASE_AGAIN_SECONDS)

    def _must_release(self) -> bool:
        """Whether the record says that this process holds the lease, or names another standby than it must."""
        if self.state is LeaseState.HELD:
            return True
        record = self._election.record
        return self.state is LeaseState.RELEASED and record is not None and record.standby != self._standby


def release_lease(store: LeaseStore, holder: str, *, keep_standby: bool) -> None:
    """Release the lease of the process `holder`, which has ended. Raise LeaseError if the server fails.

    The named standby can acquire it at once if `keep_standby`. Otherwise no standby can, because the cluster has ended.
    """
    stored = store.read()
    if stored is not None and stored.record.holder == holder:
        standby = stored.record.standby if keep_standby else ""
        store.write(msgspec.structs.replace(stored.record, holder="", standby=standby), stored.version)
