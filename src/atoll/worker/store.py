"""The object store, which holds the local shards of all sessions' logical buffers, and numbers their types.

There is one record per logical buffer. Only the executor's thread adds and removes records. Other threads hold an
ordinary reference to what they read, so memory is freed when the last reader is done.

Buffers may share memory: an array shares it with its parts, whether the parts were taken from the array or the array
was assembled from them. A buffer's memory is donated or deleted only if no other buffer shares it and no thread reads
it. Otherwise the buffer gives up its reference, and the memory is freed with the last of the others.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from atoll.errors import Code, Status, StatusError
from atoll.ir.plan import LocalArray


class ShardMemory:
    """The memory of one shard: the number of threads that read it, and the buffers that share it."""

    __slots__ = ("_buffers", "readers")

    def __init__(self) -> None:
        self.readers = 0
        self._buffers: list[weakref.ref[Buffer]] = []

    def add(self, buffer: Buffer) -> None:
        """Record that the buffer shares this memory."""
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
    """Replaces the array of a buffer that gave it up."""

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


class Buffer(msgspec.Struct, weakref=True, eq=False):
    """A logical buffer's local part: a `DeviceArray` and its type."""

    array: Any
    key: int  # of its type; a function takes all buffers with the same key
    spec: LocalArray | None  # None for the completion of a call, which has no memory
    shards: tuple[ShardMemory, ...] | None = None  # None until the buffer is read or shared; most never are
    run: object = None  # the joint run that computes it, if any
    world: int = -1  # the world whose functions can use the array; -1 if unknown
    may_fail_late: bool = False  # its run may fail after the array is ready: see `Function.may_fail_late`

    def shard_memory(self, count: int) -> tuple[ShardMemory, ...]:
        """Return the memory of the buffer's `count` shards, in order."""
        if self.shards is None:
            self.shards = tuple(ShardMemory() for _ in range(count))
        return self.shards

    @property
    def is_exclusive(self) -> bool:
        """Whether no thread reads the memory and no other live buffer shares it, so it may be donated or deleted."""
        if self.shards is None:
            return True
        return not any(shard.readers or shard.is_shared_with_others(self) for shard in self.shards)

    def delete(self) -> None:
        """Delete the buffer: free its memory, or give up memory that others read or share."""
        if self.is_exclusive:
            self.array.delete()
        else:
            self.leave_memory()

    def leave_memory(self) -> None:
        """Mark the buffer as deleted, and leave its memory to the other users."""
        self.array = _DELETED
        self.shards = None


class _NoArray(Deleted):
    """The array of a completion, which is the result of a call or of a read whose caller requested its status."""

    def is_deleted(self) -> bool:
        return False


NO_ARRAY = _NoArray()
# The spec of computed buffers, whose types are in their functions.
COMPUTED = LocalArray("", (), (), (), ())


def share(buffer: Buffer, sources: list[tuple[Buffer, int, int]]) -> None:
    """Let a buffer share the memory of `sources`: (buffer, index of the shard, number of the buffer's shards)."""
    taken = []
    for source, position, count in sources:
        shard = source.shard_memory(count)[position]
        shard.add(source)
        shard.add(buffer)
        taken.append(shard)
    buffer.shards = tuple(taken)


class _Expected(msgspec.Struct):
    """Replaces a buffer whose bytes have not arrived from another host."""

    is_deleted: bool = False


class MemoryHolds:
    """Protects the memory of buffers while threads read it. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def hold(self, buffer: Buffer, count: int) -> Callable[[], None]:
        """Protect a buffer's memory from being donated or deleted until the result is called, on any thread."""
        shards = buffer.shard_memory(count)
        self._count(shards, 1)
        return lambda: self._count(shards, -1)

    def hold_all(self, buffers: Iterable[tuple[Buffer, int]]) -> Callable[[], None]:
        """Protect several buffers, each with its number of shards, as `hold` does."""
        shards = [shard for buffer, count in buffers for shard in buffer.shard_memory(count)]
        self._count(shards, 1)
        return lambda: self._count(shards, -1)

    def _count(self, shards: Sequence[ShardMemory], change: int) -> None:
        with self._lock:
            for shard in shards:
                shard.readers += change


class Store:
    """The records of one session: buffers, errors, and markers of expected buffers."""

    def __init__(self) -> None:
        self._records: dict[int, Buffer | Status | _Expected] = {}

    def set(self, handle: int, record: Buffer | Status) -> None:
        self._records[handle] = record

    def expect(self, handle: int) -> None:
        """Mark a buffer as expected until `arrive`."""
        self._records[handle] = _Expected()

    def arrive(self, handle: int, record: Buffer | Status) -> None:
        """Store an expected buffer or its error, unless it was freed or deleted meanwhile."""
        expected = self._records.get(handle)
        if type(expected) is not _Expected:
            return
        self._records[handle] = record
        if expected.is_deleted and isinstance(record, Buffer):
            record.delete()

    def get(self, handle: int) -> Buffer:
        """Return a buffer. Raise its error, or NOT_FOUND."""
        record = self._records.get(handle)
        if type(record) is Buffer:
            return record
        if isinstance(record, Status):
            raise record.exception()
        raise StatusError(Code.NOT_FOUND, f"array {handle} is not on this host")

    def find(self, handles: Sequence[int]) -> list[Buffer] | None:
        """Return several buffers, or None if one of them is expected. Raise as `get` does.

        Without a call per buffer, since launches have many.
        """
        records = self._records
        found = [record for handle in handles if type(record := records.get(handle)) is Buffer]
        if len(found) == len(handles):
            return found
        if any([type(records.get(handle)) is _Expected for handle in handles]):
            return None
        return [self.get(handle) for handle in handles]

    def set_all(self, records: Mapping[int, Buffer]) -> None:
        self._records.update(records)

    def forget(self, handles: Iterable[int]) -> None:
        """Forget several handles, which frees their memory unless others use it."""
        records = self._records
        for handle in handles:
            records.pop(handle, None)

    def delete(self, handle: int) -> None:
        """Delete the memory of a buffer. The handle stays until it is forgotten."""
        record = self._records.get(handle)
        if isinstance(record, Buffer) and record.spec is not None:
            record.delete()
        elif isinstance(record, _Expected):
            record.is_deleted = True

    def fail(self, buffer: Buffer, status: Status) -> None:
        """Replace the buffer with an error."""
        for handle, record in self._records.items():
            if record is buffer:
                self._records[handle] = status

    def handles(self) -> list[int]:
        return list(self._records)

    def __len__(self) -> int:
        return len(self._records)


class TypeKeys:
    """Numbers for types, so that one comparison of integers checks an argument of a launch.

    A type is (dtype, shard shapes, devices, layout). A layout is major-to-minor, or None for the default. Safe to use
    from any thread: the executor's thread asks for arrays, and the threads that compile for functions.
    """

    def __init__(self) -> None:
        self._keys: dict[Any, int] = {}
        self._types: list[Any] = []
        self._lock = threading.Lock()  # held to add a type

    def of(
        self,
        dtype: str,
        shard_shapes: tuple[tuple[int, ...], ...],
        devices: tuple[int, ...],
        layout: tuple[int, ...] | None = None,
    ) -> int:
        description = (dtype, shard_shapes, devices, layout)
        key = self._keys.get(description)
        return self._add(description) if key is None else key

    def _add(self, description: Any) -> int:
        with self._lock:
            key: int | None = self._keys.get(description)
            if key is None:
                key = len(self._types)
                self._types.append(description)
                self._keys[description] = key  # last, because other threads read it without the lock
            return key

    def layout(self, key: int) -> tuple[int, ...] | None:
        layout: tuple[int, ...] | None = self._types[key][3]
        return layout

    def shards(self, key: int) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """Return the dtype, and the shape of each shard."""
        dtype, shapes, _, _ = self._types[key]
        return dtype, shapes

    def shard(self, key: int, number: int) -> tuple[str, tuple[int, ...], int]:
        """Return the dtype of a shard, its shape and its device."""
        dtype, shapes, devices, _ = self._types[key]
        return dtype, shapes[number], devices[number]

    def describe(self, key: int) -> str:
        dtype, shapes, devices, layout = self._types[key]
        shape = shapes[0] if len(set(shapes)) == 1 else shapes
        order = "" if layout is None else f" with dimensions in the order {list(layout)}"
        return f"{dtype}{list(shape)}{order} on local devices {list(devices)}"
