"""Copies of much memory: other threads of the process run meanwhile, and what there is of it is copied side by side."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class Source(Protocol):
    """What is written into an array."""

    nbytes: int

    def copy_to(self, place: Array) -> None: ...


_LONG_BYTES = 128 << 10  # above, a copy takes longer than threads to hand the interpreter over and back
_SIDE_BY_SIDE_BYTES = 1 << 20
_HELPERS = 3


def copy(source: memoryview, target: memoryview) -> None:
    """Bytes into as many others. Python's own copies keep the interpreter to themselves, NumPy's do not."""
    if source.nbytes < _LONG_BYTES:
        target[:] = source
    else:
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)


def copy_all(copies: Sequence[tuple[Source, Array]]) -> None:
    """Of each pair the source into the array."""
    left = deque(copies)
    helpers: list[Future[None]] = []
    if sum([source.nbytes for source, _ in copies]) >= _SIDE_BY_SIDE_BYTES:
        helpers = [_helpers().submit(_copy_each, left) for _ in range(min(len(copies) - 1, _HELPERS))]
    try:
        _copy_each(left)
    finally:
        for helper in helpers:
            if not helper.cancel():  # one that has not begun is not waited for
                helper.result()


def _copy_each(left: deque[tuple[Source, Array]]) -> None:
    """Until none is left; also on other threads."""
    while True:
        try:
            source, target = left.popleft()
        except IndexError:
            return
        source.copy_to(target)


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HELPERS, "atoll-copy")
