"""The proxy's records of a session's arrays: type, error, and whether they are deleted.

With them, the proxy answers queries without the cluster, which has the contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from atoll.errors import Status, not_found
from atoll.ir.types import ArraySpec


class Memory(msgspec.Struct, eq=False):
    """Memory that arrays share if one is a part or a view of another. It is part of the memory of each of `parents`."""

    parents: tuple[Memory, ...] = ()
    deleted: bool = False  # deleted or donated as a whole
    partly_deleted: bool = False  # a part was deleted or donated

    @property
    def is_deleted(self) -> bool:
        return self.deleted or self.partly_deleted or any(parent.deleted for parent in self.parents)

    def delete(self) -> None:
        self.deleted = True
        for parent in self.parents:
            parent.partly_deleted = True


class Origin(msgspec.Struct, eq=False):
    """The Python stack of the request that made some arrays. The client keeps it until they are deleted."""

    context: int
    users: int


class Deferred(Protocol):
    """A run that has not started. `record` is that of its results."""

    record: ArrayRecord

    def start(self) -> None:
        """Start the run, and define its results and its argument as usual arrays."""

    def dropped(self, handles: Sequence[int]) -> list[int]:
        """Note that the client has dropped some of its arrays. Return the handles that the cluster can release."""


class ArrayRecord(msgspec.Struct, eq=False):
    """An array of a session. If the request that makes it has failed, `error` is set.

    `deferred` is set for the results and the argument of a run that has not started. All of its results have one
    record.
    """

    spec: ArraySpec | None
    memory: Memory
    origin: Origin | None = None
    error: Status | None = None
    ready: bool = False  # known to be computed without an error
    deferred: Deferred | None = None
    made_at: float = 0.0  # when the request that makes it was handled, in seconds of the event loop


class Arrays(msgspec.Struct):
    """The session's table of arrays by handle. `ended_contexts` collects stacks that no array refers to any more."""

    ended_contexts: list[int]
    records: dict[int, ArrayRecord] = msgspec.field(default_factory=dict)

    def get(self, handle: int) -> ArrayRecord:
        """Return the record, to use the array: the run that makes it starts, and the run that waits with it.

        Raises the array's own error, or NOT_FOUND for an unknown handle.
        """
        record = self.records.get(handle)
        if record is None:
            raise not_found(f"unknown array handle {handle}")
        if record.deferred is not None:
            record.deferred.start()
            record = self.records[handle]
        if record.error is not None:
            raise record.error.exception()
        return record

    def get_to_await(self, handle: int) -> ArrayRecord:
        """Return the record as `get` does, to wait for the array. A run does not start if its argument is awaited."""
        record = self.records.get(handle)
        if record is not None and record.deferred is not None and record.deferred.record is not record:
            return record
        return self.get(handle)

    def get_all(self, handles: Sequence[int]) -> list[ArrayRecord]:
        """Return several records. Raises as `get` does. Without a call per array, since requests have many."""
        found: list[ArrayRecord] = []
        for record in map(self.records.get, handles):
            if record is None or record.error is not None or record.deferred is not None:
                return [self.get(handle) for handle in handles]
            found.append(record)
        return found

    def spec(self, handle: int) -> ArraySpec:
        spec = self.get(handle).spec
        assert spec is not None
        return spec

    def remove(self, handles: Sequence[int]) -> tuple[list[int], list[int]]:
        """Remove arrays that the client has dropped, without a call per array.

        Return the handles that the cluster can release, and those that are unknown.
        """
        records = self.records
        released: list[int] = []
        missing: list[int] = []
        deferred: dict[Deferred, list[int]] = {}
        for handle in handles:
            record = records.pop(handle, None)
            if record is None:
                missing.append(handle)
                continue
            if record.deferred is not None:
                deferred.setdefault(record.deferred, []).append(handle)
            elif record.error is None:
                released.append(handle)
            origin = record.origin
            if origin is not None:
                origin.users -= 1
                if origin.users == 0:
                    self.ended_contexts.append(origin.context)
        for run, dropped in deferred.items():
            released += run.dropped(dropped)
        return released, missing
