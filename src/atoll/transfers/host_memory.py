"""Memory of this process that devices can use as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

_ALIGNMENT = 64


def aligned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialised bytes at a multiple of 64, which a CPU device can use without another copy."""
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]
