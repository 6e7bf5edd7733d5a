"""The rows of a message, as the `Contents` of a piece: they are gathered where they are written, and not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.host_services.host_data import bytes_of
from atoll.host_services.slabs import ArrayContents
from atoll.transfers.piece_contents import Buffers, Joined

Array = np.ndarray[Any, Any]


class Rows:
    """Rows of an array, which must not change: all of them, or those of `index`, one after the other."""

    __slots__ = ("_array", "_index", "nbytes", "shape")

    def __init__(self, array: Array, index: Array | None = None) -> None:
        self._array = array
        self._index = index
        self.shape: tuple[int, ...] = array.shape if index is None else (len(index), *array.shape[1:])
        self.nbytes = array.nbytes // max(1, len(array)) * self.shape[0]

    def copy_to(self, place: Array) -> None:
        """Writes them into an array of their shape."""
        array = self._array
        if array.flags.c_contiguous and place.flags.c_contiguous:
            # As bytes: of some dtypes, such as bfloat16, NumPy's copies keep the interpreter to themselves.
            array, place = _row_bytes(array), _row_bytes(place)
            if self._index is not None:  # all of it is in range; NumPy would copy more to tell that it is not
                np.take(array, self._index, axis=0, out=place, mode="clip")
                return
        place[...] = array if self._index is None else array[self._index]

    def views(self) -> Sequence[memoryview]:
        return self.slice(0, self.nbytes)

    def slice(self, start: int, stop: int) -> Sequence[memoryview]:
        if self._index is None:
            return ArrayContents(self._array).slice(start, stop)
        size = self.nbytes // len(self._index)
        first, last = start // size, -(-stop // size)
        found = memoryview(bytes_of(np.ascontiguousarray(self._array[self._index[first:last]])))
        return (found[start - first * size : stop - first * size],)

    def write_into(self, target: memoryview) -> None:
        self.copy_to(np.ndarray(self.shape, self._array.dtype, buffer=target))


class RowMessage(Joined):
    """The numbers of rows, and then the rows."""

    __slots__ = ("numbers", "rows")

    def __init__(self, numbers: Array, rows: Sequence[Rows]) -> None:
        self.numbers = memoryview(bytes_of(numbers))
        self.rows = rows
        super().__init__([Buffers([self.numbers]), *rows])


def _row_bytes(array: Array) -> Array:
    return array.reshape(len(array), -1).view(np.uint8)
