"""The arrays of a session as its proxy knows them: type, state, and whether they are deleted.

The cluster holds the contents. Here is what the proxy must answer without the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.errors import Code, Status, StatusError, not_found
from atoll.ir.types import ArraySpec


class Memory:
    """What arrays share when one is a part, or a view, of another. `parents` hold this memory as a part of theirs."""

    __slots__ = ("deleted", "parents", "partly_deleted")

    def __init__(self, parents: tuple[Memory, ...] = ()) -> None:
        self.deleted = False  # deleted or donated as a whole
        self.partly_deleted = False  # a part was deleted or donated
        self.parents = parents

    @property
    def is_deleted(self) -> bool:
        return self.deleted or self.partly_deleted or any(parent.deleted for parent in self.parents)

    def delete(self) -> None:
        self.deleted = True
        for parent in self.parents:
            parent.partly_deleted = True


class Origin:
    """The Python stack of the request that made some arrays; the client keeps it until they are deleted."""

    __slots__ = ("context", "users")

    def __init__(self, context: int, users: int) -> None:
        self.context = context
        self.users = users


@dataclass(slots=True)
class ArrayRecord:
    """An array by its handle. `error` is set where the request that should have made it failed."""

    spec: ArraySpec | None
    memory: Memory
    origin: Origin | None = None
    error: Status | None = None
    ready: bool = False  # known to hold its value: reading it cannot meet a failed computation


@dataclass
class Arrays:
    """The session's table of handles. Stacks to which no array refers any more are added to `ended_contexts`."""

    ended_contexts: list[int]
    records: dict[int, ArrayRecord] = field(default_factory=dict)

    def get(self, handle: int) -> ArrayRecord:
        """The record; raises the array's own error, or NOT_FOUND."""
        record = self.records.get(handle)
        if record is None:
            raise not_found(f"unknown array handle {handle}")
        if record.error is not None:
            raise StatusError(Code(record.error.code), record.error.message, record.error.payloads)
        return record

    def spec(self, handle: int) -> ArraySpec:
        spec = self.get(handle).spec
        assert spec is not None
        return spec

    def remove(self, handle: int) -> ArrayRecord | None:
        record = self.records.pop(handle, None)
        if record is not None and record.origin is not None:
            origin = record.origin
            origin.users -= 1
            if origin.users == 0:
                self.ended_contexts.append(origin.context)
        return record
