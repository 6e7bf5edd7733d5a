"""The object store: the local shards of every session's logical buffers.

One record a logical buffer. Only the executor's thread adds and removes; other threads keep what they read alive by an
ordinary reference, so memory is freed when the last reader is done.

Buffers may share memory: a part and the whole that it was taken from, an array and the parts that it was assembled
from. Memory is donated or deleted only by a buffer that is the only one to have it, with no thread reading it. One that
shares its memory gives up its own reference instead, and the memory is freed with the last of the others.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.errors import Code, Status, StatusError
from atoll.ir.plan import LocalArray


class ShardMemory:
    """The memory of one shard: which buffers have it, once several do, and how many threads read it."""

    __slots__ = ("_buffers", "readers")

    def __init__(self) -> None:
        self.readers = 0
        self._buffers: list[weakref.ref[Buffer]] = []

    def add(self, buffer: Buffer) -> None:
        """The buffer has this memory, as others do."""
        holders = [other for other in self._buffers if other() is not None]
        if all(other() is not buffer for other in holders):
            holders.append(weakref.ref(buffer))
        self._buffers = holders

    def is_shared_with_others(self, buffer: Buffer) -> bool:
        for reference in self._buffers:
            other = reference()
            if other is not None and other is not buffer and other.shards is not None:
                return True
        return False


class Deleted:
    """Stands for the array of a buffer that gave it up."""

    nbytes = 0

    def is_deleted(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return True

    def delete(self) -> None:
        return None

    def block_until_ready(self) -> None:
        return None


_DELETED = Deleted()


@dataclass(slots=True, weakref_slot=True, eq=False)
class Buffer:
    """A `DeviceArray` and the key of its type: equal keys may be given to the same function.

    `spec` is None for the completion of a call, which has no memory. `shards` is None until somebody reads the buffer
    or shares its memory: most are only computed with.
    """

    array: Any
    key: int
    spec: LocalArray | None
    shards: tuple[ShardMemory, ...] | None = None

    def shard_memory(self, count: int) -> tuple[ShardMemory, ...]:
        """The memory of its `count` shards, in order."""
        if self.shards is None:
            self.shards = tuple(ShardMemory() for _ in range(count))
        return self.shards

    @property
    def is_exclusive(self) -> bool:
        """Whether nobody reads its memory and no other live buffer has it, so that it may be donated or deleted."""
        if self.shards is None:
            return True
        return not any(shard.readers or shard.is_shared_with_others(self) for shard in self.shards)

    def delete(self) -> None:
        """Frees its memory, or gives up what others still have. It is deleted for its owner in either case."""
        if self.is_exclusive:
            self.array.delete()
        else:
            self.give_up()

    def give_up(self) -> None:
        """Leaves the memory to the others that have it; this buffer is as good as deleted."""
        self.array = _DELETED
        self.shards = None


class _NoArray(Deleted):
    """The completion of a call or of a read, for a caller that asked for its status, is a value without an array."""

    def is_deleted(self) -> bool:
        return False


NO_ARRAY = _NoArray()

# What a computed buffer is made of is known to its function, not kept with each buffer.
COMPUTED = LocalArray("", (), (), (), ())


def share(buffer: Buffer, sources: list[tuple[Buffer, int, int]]) -> None:
    """The buffer's shards are those of `sources`: (another buffer, which of its shards, how many it has)."""
    taken = []
    for source, position, count in sources:
        shard = source.shard_memory(count)[position]
        shard.add(source)
        shard.add(buffer)
        taken.append(shard)
    buffer.shards = tuple(taken)


@dataclass(slots=True)
class _Expected:
    """In the place of a buffer whose bytes come from another host."""

    is_deleted: bool = False


class Readers:
    """Counts who reads the memory of shards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def hold(self, buffer: Buffer, count: int) -> Callable[[], None]:
        """Its memory is neither donated nor deleted until the result is called, on any thread."""
        shards = buffer.shard_memory(count)
        self._count(shards, 1)
        return lambda: self._count(shards, -1)

    def _count(self, shards: tuple[ShardMemory, ...], change: int) -> None:
        with self._lock:
            for shard in shards:
                shard.readers += change


class Store:
    """The buffers of one session, or what stands in a buffer's place: an error, or that it is expected."""

    def __init__(self) -> None:
        self._records: dict[int, Buffer | Status | _Expected] = {}

    def set(self, handle: int, record: Buffer | Status) -> None:
        self._records[handle] = record

    def expect(self, handle: int) -> None:
        """What is to be here comes later, by `arrive`."""
        self._records[handle] = _Expected()

    def is_expected(self, handle: int) -> bool:
        return type(self._records.get(handle)) is _Expected

    def arrive(self, handle: int, record: Buffer | Status) -> None:
        """What was expected is here. It may have been freed or deleted meanwhile."""
        expected = self._records.get(handle)
        if type(expected) is not _Expected:
            return
        self._records[handle] = record
        if expected.is_deleted and isinstance(record, Buffer):
            record.delete()

    def get(self, handle: int) -> Buffer:
        """The buffer; raises its error, or NOT_FOUND."""
        record = self._records.get(handle)
        if type(record) is Buffer:
            return record
        if isinstance(record, Status):
            raise StatusError(Code(record.code), record.message, record.payloads)
        raise StatusError(Code.NOT_FOUND, f"array {handle} is not on this host")

    def free(self, handle: int, delete: bool) -> None:
        """Forgets the handle; with `delete`, deletes its memory and keeps the handle until it is freed."""
        if not delete:
            self._records.pop(handle, None)
            return
        record = self._records.get(handle)
        if isinstance(record, Buffer) and record.spec is not None:
            record.delete()
        elif isinstance(record, _Expected):
            record.is_deleted = True

    def fail(self, buffer: Buffer, status: Status) -> None:
        """What stands for the buffer is the error from now on."""
        for handle, record in self._records.items():
            if record is buffer:
                self._records[handle] = status

    def handles(self) -> list[int]:
        return list(self._records)

    def __len__(self) -> int:
        return len(self._records)
