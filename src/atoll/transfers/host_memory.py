"""Memory of this process that devices can use as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_ALIGNMENT = 64
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Lent:
    """What arrays over lent memory refer to: numpy's own buffers would be skipped by views of views."""

    __slots__ = ("__array_interface__", "_give_back", "_memory")

    def __init__(self, memory: Any, nbytes: int, give_back: Callable[[], None]) -> None:
        self._memory = memory
        self._give_back = give_back
        bytes_ = np.frombuffer(memory, np.uint8)
        address = (bytes_.ctypes.data, not bytes_.flags.writeable)
        self.__array_interface__ = {"version": 3, "data": address, "shape": (nbytes,), "typestr": "|u1"}

    def __del__(self) -> None:
        self._give_back()


def lent(memory: Any, nbytes: int, give_back: Callable[[], None]) -> Bytes:
    """The first bytes of a buffer. `give_back` is called when nothing refers to the array any more, nor to a view of
    it: on any thread, whatever locks that holds.
    """
    return np.asarray(_Lent(memory, nbytes, give_back))


def aligned(nbytes: int, allocate: Callable[..., Bytes] = np.empty) -> Bytes:
    """Uninitialised bytes at a multiple of 64, which a CPU device can use without another copy."""
    raw = allocate(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]
