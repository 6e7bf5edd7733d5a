"""Host memory that devices can use without a copy, and copies of much memory.

A large copy lets other threads of the process run meanwhile. Several large copies run side by side.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol

import numpy as np

_ALIGNMENT = 64
_LONG_BYTES = 128 << 10  # a shorter copy takes less time than handing over the interpreter lock
_SIDE_BY_SIDE_BYTES = 1 << 20
_HELPERS = 3
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Array = np.ndarray[Any, Any]


class _Lent:
    """The base of all arrays over lent memory. A view of a view would not keep a NumPy array alive as its base."""

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
    """Return the first `nbytes` of a buffer as an array.

    `give_back` is called once nothing refers to the array or to a view of it. The call may be on any thread, and the
    thread may hold any lock.
    """
    return np.asarray(_Lent(memory, nbytes, give_back))


def aligned(nbytes: int, allocate: Callable[..., Bytes] = np.empty) -> Bytes:
    """Return uninitialized bytes at a multiple of 64, which a CPU device can use without another copy."""
    raw = allocate(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]


class Source(Protocol):
    """Content that can be written into an array."""

    nbytes: int

    def copy_to(self, place: Array) -> None: ...


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes between buffers of one size."""
    # Python holds the global interpreter lock while it copies, NumPy does not.
    if source.nbytes < _LONG_BYTES:
        target[:] = source
    else:
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)


def copy_all(copies: Sequence[tuple[Source, Array]]) -> None:
    """Copy the source of each pair into its array, on several threads if that is faster."""
    left = deque(copies)
    helpers: list[Future[None]] = []
    if sum([source.nbytes for source, _ in copies]) >= _SIDE_BY_SIDE_BYTES:
        with contextlib.suppress(RuntimeError):  # an exit handler can start no thread since Python 3.12
            for _ in range(min(len(copies) - 1, _HELPERS)):
                helpers.append(_helpers().submit(_copy_each, left))
    try:
        _copy_each(left)
    finally:
        for helper in helpers:
            if not helper.cancel():  # do not wait for a helper that has not begun
                helper.result()


def _copy_each(left: deque[tuple[Source, Array]]) -> None:
    while True:
        try:
            source, target = left.popleft()
        except IndexError:
            return
        source.copy_to(target)


@functools.cache
def _helpers() -> Executor:
    # An exit handler that is the first to use JAX imports this module, but cannot import thread pools.
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(_HELPERS, "atoll-copy")
