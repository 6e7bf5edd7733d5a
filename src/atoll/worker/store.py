"""The object store: the local shards of every session's logical buffers.

One record a logical buffer. Only the executor's thread adds and removes; other threads hold on to a record's
array by an ordinary reference while they read it, so memory goes when the last reader is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.errors import Code, Status, StatusError
from atoll.ir.plan import LocalArray


class Readers:
    """How many threads still read some memory, which must be neither donated nor deleted under them.

    Buffers that share shards share one of these: `join` makes two count as one from then on.
    """

    __slots__ = ("_count", "_joined")

    def __init__(self) -> None:
        self._count = 0
        self._joined: Readers | None = None

    def _root(self) -> Readers:
        return self if self._joined is None else self._joined._root()

    def add(self, change: int) -> None:
        self._root()._count += change

    @property
    def count(self) -> int:
        return self._root()._count

    def join(self, other: Readers) -> None:
        mine, theirs = self._root(), other._root()
        if mine is not theirs:
            mine._count += theirs._count
            theirs._joined = mine


@dataclass(slots=True)
class Buffer:
    """A stacked array (see `worker.xla.arrays`) and the key of its type: equal keys may be given to the same function.

    `spec` is None for the completion of a call, whose `array` is the run's token.
    """

    array: Any
    key: int
    spec: LocalArray | None
    shared: Readers | None = None  # made when first needed

    @property
    def readers(self) -> Readers:
        if self.shared is None:
            self.shared = Readers()
        return self.shared

    @property
    def is_read(self) -> bool:
        return self.shared is not None and self.shared.count > 0


class TypeKeys:
    """Small numbers for (dtype, shard shapes, devices, layout): comparing two numbers checks an argument.

    A layout is major-to-minor, or None for the platform's default.
    """

    def __init__(self) -> None:
        self._keys: dict[Any, int] = {}
        self._types: list[Any] = []

    def of(
        self,
        dtype: str,
        shard_shapes: tuple[tuple[int, ...], ...],
        devices: tuple[int, ...],
        layout: tuple[int, ...] | None = None,
    ) -> int:
        description = (dtype, shard_shapes, devices, layout)
        key = self._keys.get(description)
        if key is None:
            key = len(self._types)
            self._types.append(description)
            self._keys[description] = key  # last: other threads look here first
        return key

    def layout(self, key: int) -> tuple[int, ...] | None:
        layout: tuple[int, ...] | None = self._types[key][3]
        return layout

    def describe(self, key: int) -> str:
        dtype, shapes, devices, layout = self._types[key]
        shape = shapes[0] if len(set(shapes)) == 1 else shapes
        order = "" if layout is None else f" with dimensions in the order {list(layout)}"
        return f"{dtype}{list(shape)}{order} on local devices {list(devices)}"


class Store:
    """The buffers of one session, or the error that stands in a buffer's place."""

    def __init__(self) -> None:
        self._records: dict[int, Buffer | Status] = {}

    def set(self, handle: int, record: Buffer | Status) -> None:
        self._records[handle] = record

    def get(self, handle: int) -> Buffer:
        """The buffer; raises its error, or NOT_FOUND."""
        record = self._records.get(handle)
        if type(record) is Buffer:
            return record
        if isinstance(record, Status):
            raise StatusError(Code(record.code), record.message, record.payloads)
        raise StatusError(Code.NOT_FOUND, f"array {handle} is not on this host")

    def free(self, handle: int, delete: bool) -> None:
        if not delete:
            self._records.pop(handle, None)
            return
        record = self._records.get(handle)
        if isinstance(record, Buffer) and record.spec is not None:
            if record.is_read:
                self._records.pop(handle)
            else:
                record.array.delete()

    def __len__(self) -> int:
        return len(self._records)
