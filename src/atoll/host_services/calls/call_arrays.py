"""The arrays of calls into clients' Python, as NumPy arrays on both sides. A token is None, and has no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.host_services.calls.call_messages import ArrayType
from atoll.host_services.host_data import bytes_of
from atoll.transfers.dtypes import dtype_name, numpy_dtype

Array = np.ndarray[Any, Any]

_TOKEN = ArrayType("", (), 0)


def packed(arrays: Sequence[Any]) -> tuple[tuple[ArrayType, ...], list[Any]]:
    """What a message says of the arrays, or of what NumPy makes arrays of, and their bytes."""
    types: list[ArrayType] = []
    contents: list[Any] = []
    for each in arrays:
        if each is None:
            types.append(_TOKEN)
            continue
        array = np.ascontiguousarray(each).reshape(np.shape(each))
        types.append(ArrayType(dtype_name(array.dtype), array.shape, array.nbytes))
        contents.append(bytes_of(array))
    return tuple(types), contents


def unpacked(whole: Array, kind: ArrayType, offset: int) -> Array | None:
    """The array as a view of a piece, or of a piece's copy. Raises ValueError or TypeError where it is none."""
    if not kind.dtype:
        return None
    return whole[offset : offset + kind.nbytes].view(numpy_dtype(kind.dtype)).reshape(kind.shape)
