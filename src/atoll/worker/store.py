"""The object store: the local shards of every session's logical buffers.

One record a logical buffer. Only the executor's thread adds and removes; other threads hold on to a record's
array by an ordinary reference while they read it, so memory goes when the last reader is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.errors import Code, Status, StatusError
from atoll.ir.plan import LocalArray


@dataclass(slots=True)
class Buffer:
    """A stacked array (see `worker.xla`) and the key of its type: equal keys may be given to the same function.

    `spec` is None for the completion of a call, whose `array` is the run's token.
    """

    array: Any
    key: int
    spec: LocalArray | None
    # Threads that still read the memory: it must be neither donated nor deleted under them.
    readers: int = 0


class TypeKeys:
    """Small numbers for (dtype, shard shapes, devices): comparing two numbers checks an argument."""

    def __init__(self) -> None:
        self._keys: dict[Any, int] = {}

    def of(self, dtype: str, shard_shapes: tuple[tuple[int, ...], ...], devices: tuple[int, ...]) -> int:
        description = (dtype, shard_shapes, devices)
        key = self._keys.get(description)
        if key is None:
            key = self._keys[description] = len(self._keys)
        return key

    def describe(self, key: int) -> str:
        dtype, shapes, devices = list(self._keys)[key]
        shape = shapes[0] if len(set(shapes)) == 1 else shapes
        return f"{dtype}{list(shape)} on local devices {list(devices)}"


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
            if record.readers:
                self._records.pop(handle)
            else:
                record.array.delete()

    def __len__(self) -> int:
        return len(self._records)
