"""Memory of this process that devices can use as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_ALIGNMENT = 64
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def aligned(nbytes: int, allocate: Callable[..., Bytes] = np.empty) -> Bytes:
    """Uninitialised bytes at a multiple of 64, which a CPU device can use without another copy."""
    raw = allocate(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]
