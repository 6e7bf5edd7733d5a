"""Copies arrays one slab at a time, so that a copy needs little additional memory.

A slab is a box of an array whose elements are consecutive in the array's order.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from atoll.host_services import host_data
from atoll.ir.exchange import Grid, common, relative
from atoll.ir.types import Box, Shape
from atoll.transfers.piece_contents import Filled
from atoll.transfers.transfer_engine import Group

SLAB_BYTES = 8 << 20
_PAGE = mmap.PAGESIZE
_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)
Array = np.ndarray[Any, Any]


def slabs(shape: Shape, itemsize: int, nbytes: int = SLAB_BYTES) -> Iterator[Box]:
    """Yield the slabs of an array in order. Each has at most `nbytes` bytes, or one element."""
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:]) * itemsize
    if row > nbytes:
        for number in range(shape[0]):
            for rest in slabs(shape[1:], itemsize, nbytes):
                yield ((number, number + 1), *rest)
        return
    rows = nbytes // max(1, row)
    for start in range(0, shape[0], max(1, rows)):
        yield ((start, min(start + rows, shape[0])), *[(0, size) for size in shape[1:]])


class ArrayPart(NamedTuple):
    """Contiguous contents for a box of an array. `consumed` contents are not read by others, and may be released."""

    box: Box
    contents: Array
    consumed: bool


def assemble(target: Array, parts: Sequence[ArrayPart]) -> None:
    """Copy the parts, whose boxes form a tiling, into the target.

    The function copies one slab of the target at a time. It touches the target's memory only then, and returns the
    memory of consumed parts to the system page by page. So the total is never much more than the array.
    """
    if not parts:
        return
    grid = Grid(tuple(part.box for part in parts))
    consumed = {number: _Consumed(part.contents) for number, part in enumerate(parts) if part.consumed}
    for slab in slabs(target.shape, target.itemsize):
        for box, numbers in grid.overlapping(slab):
            for number in numbers:
                shared = common(box, slab)
                source = host_data.cut(parts[number].contents, relative(shared, box))
                host_data.cut(target, shared)[...] = source
                if number in consumed:
                    consumed[number].advance(source.nbytes)


def row_major_parts(shape: Shape, boxes: tuple[Box, ...], shards: Sequence[Array]) -> Iterator[Filled]:
    """Yield the contents of a nonempty array in row-major order, slab by slab. Each shard fills its box."""
    grid, dtype = Grid(boxes), shards[0].dtype
    for slab in slabs(shape, dtype.itemsize):
        extents = tuple([stop - start for start, stop in slab])
        yield Filled(math.prod(extents) * dtype.itemsize, partial(_fill, slab, extents, grid, shards))


def _fill(slab: Box, extents: Shape, grid: Grid, shards: Sequence[Array], target: memoryview) -> None:
    whole: Array = np.ndarray(extents, shards[0].dtype, buffer=target)
    for box, numbers in grid.overlapping(slab):
        shared = common(box, slab)
        host_data.cut(whole, relative(shared, slab))[...] = host_data.cut(shards[numbers[0]], relative(shared, box))


class _Consumed:
    """Contents that are read once, from the beginning to the end."""

    __slots__ = ("_kept", "_read")

    def __init__(self, contents: Array) -> None:
        self._read = contents.ctypes.data
        self._kept = -(-self._read // _PAGE) * _PAGE  # address of the first page that was not released

    def advance(self, nbytes: int) -> None:
        """Release the pages that are completely read, after `nbytes` more bytes have been read."""
        self._read += nbytes
        stop = self._read // _PAGE * _PAGE
        if _DONTNEED is not None and stop > self._kept:
            _madvise(self._kept, stop - self._kept, _DONTNEED)  # ignore errors: the pages then stay allocated
            self._kept = stop


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ArrayContents:
    """The elements of an array in order, as the `Contents` of a piece.

    Noncontiguous bytes are copied when they are sent, one chunk at a time. The array must not change before.
    """

    __slots__ = ("_array", "nbytes", "together")
    launch = 0
    in_parts = False
    group: Group = ()

    def __init__(self, array: Array, together: int = 0) -> None:
        self._array = array
        self.nbytes = array.nbytes
        self.together = together

    def views(self) -> Sequence[memoryview]:
        return self.slice(0, self.nbytes)

    def slice(self, start: int, stop: int) -> Sequence[memoryview]:
        return list(_bytes(self._array, start, stop)) if start < stop else []

    def write_into(self, target: memoryview) -> None:
        np.ndarray(self._array.shape, self._array.dtype, buffer=target)[...] = self._array


def _bytes(array: Array, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes from `start` to `stop` of the array's elements in order. Copies at most these bytes."""
    if array.flags.c_contiguous:
        yield memoryview(host_data.bytes_of(array))[start:stop]
        return
    size = array.nbytes // len(array)
    first, last = -(-start // size), stop // size  # whole rows
    if first > last:
        yield from _bytes(array[last, ...], start - last * size, stop - last * size)
        return
    if start < first * size:
        yield from _bytes(array[first - 1, ...], start - (first - 1) * size, size)
    if first < last:
        yield memoryview(host_data.bytes_of(np.ascontiguousarray(array[first:last])))
    if last * size < stop:
        yield from _bytes(array[last, ...], 0, stop - last * size)
