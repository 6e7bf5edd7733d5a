"""Null arrays: shapes, dtypes, and the moment from which they are there. A reader gets zeros."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from atoll.devices.null.sim_events import SimEvent
from atoll.ir.types import DTYPE_BITS
from atoll.transfers.dtypes import numpy_dtype

_POLL_SECONDS = 2e-4


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    return (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8


def wait_for(moment: SimEvent) -> None:
    """Until it is over: for threads that watch or read."""
    while not moment.is_over:
        time.sleep(_POLL_SECONDS)


class NullShard:
    """A part of a null array on one device."""

    __slots__ = ("dtype_name", "moment", "shape")

    def __init__(self, dtype_name: str, shape: tuple[int, ...], moment: SimEvent) -> None:
        self.dtype_name = dtype_name
        self.shape = shape
        self.moment = moment

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Waits until it is there: for threads that read."""
        self.block_until_ready()
        return np.zeros(self.shape, numpy_dtype(self.dtype_name))

    def block_until_ready(self) -> None:
        wait_for(self.moment)


class NullArray:
    """A `devices.device.DeviceArray`, without contents."""

    __slots__ = ("_is_deleted", "dtype_name", "moment", "shapes")

    def __init__(self, dtype_name: str, shapes: tuple[tuple[int, ...], ...], moment: SimEvent) -> None:
        self.dtype_name = dtype_name
        self.shapes = shapes
        self.moment = moment
        self._is_deleted = False

    @property
    def shards(self) -> list[NullShard]:
        return [NullShard(self.dtype_name, shape, self.moment) for shape in self.shapes]

    @property
    def nbytes(self) -> int:
        return sum(bytes_of(self.dtype_name, shape) for shape in self.shapes)

    def is_deleted(self) -> bool:
        return self._is_deleted

    def is_ready(self) -> bool:
        return self.moment.is_over

    def block_until_ready(self) -> None:
        wait_for(self.moment)

    def delete(self) -> None:
        self._is_deleted = True
