"""A lease in memory, and a clock, for tests."""

from __future__ import annotations

from collections.abc import Callable

from atoll.errors import LeaseError
from atoll.leadership.lease_record import LeaseRecord, StoredRecord


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class LeaseInMemory:
    """Server of one lease. It fails while `fails`, and loses the replies to writes while `loses_replies`.

    It calls `on_request()` before it handles each request.
    """

    name = "the lease of a test"

    def __init__(self) -> None:
        self.stored: StoredRecord | None = None
        self.fails = False
        self.loses_replies = False
        self.on_request: Callable[[], None] = lambda: None
        self._version = 0

    @property
    def record(self) -> LeaseRecord:
        assert self.stored is not None
        return self.stored.record

    def read(self) -> StoredRecord | None:
        self._handle()
        return self.stored

    def write(self, record: LeaseRecord, version: str) -> StoredRecord | None:
        self._handle()
        if version != (self.stored.version if self.stored is not None else ""):
            return None
        self._version += 1
        self.stored = StoredRecord(record, str(self._version))
        if self.loses_replies:
            raise LeaseError("no reply")
        return self.stored

    def _handle(self) -> None:
        self.on_request()
        if self.fails:
            raise LeaseError("no server answers")
