"""How many bytes the steps of a plan move: between a client and devices, between devices, and between hosts.

They count once, where they are written. What a compiled function moves by itself, in collectives, is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.ir import plan as p
from atoll.ir.types import DTYPE_BITS, ArraySpec, Box


def bytes_moved(step: p.Step, arguments: Sequence[ArraySpec]) -> int:
    """Those that the step writes in moving them; `arguments` are those of the step's program."""
    match step:
        case p.Put(array=array) | p.Receive(array=array):
            return _of_array(array)
        case p.Move(arrays=arrays):
            return sum(map(_of_array, arrays))
        case p.Get(input=value, boxes=boxes) if value < len(arguments):
            return _of_boxes(arguments[value].dtype, boxes)
    return 0


def _of_array(array: p.LocalArray) -> int:
    return sum(map(math.prod, array.shard_shapes)) * DTYPE_BITS[array.dtype] // 8


def _of_boxes(dtype: str, boxes: Sequence[Box]) -> int:
    elements = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    return elements * DTYPE_BITS[dtype] // 8
