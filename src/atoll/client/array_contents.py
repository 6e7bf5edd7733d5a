"""Numbers for the contents of large arrays, by which subscribers recognize arrays that they have received already.

A JAX array never changes. So a script that publishes the same array again, such as frozen weights, publishes the same
content, and a subscriber that has it need not receive it again.
"""

from __future__ import annotations

import itertools
import math
import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Smaller arrays have no number: to receive them again costs as little as to recognize them.
MIN_BYTES = 1 << 20
# Reads of one version that leave out arrays between them.
MAX_READS = 16

# The numbers of arrays that exist, by their address and the dtype in which they are published.
_known: dict[tuple[int, str], tuple[weakref.ref[Any], int]] = {}


class Content(NamedTuple):
    """The number of an array's content, or 0 if the array is small, and whether it was published before."""

    number: int
    is_known: bool


_SMALL = Content(0, is_known=False)


def content_of(array: Any, dtype: Any) -> Content:
    """Return the content of an array that is published with this dtype. None stands for the dtype of the array."""
    if array.nbytes < MIN_BYTES:
        return _SMALL
    key = id(array), str(dtype)
    found = _known.get(key)
    if found is not None and found[0]() is array:
        return Content(found[1], is_known=True)
    number = 1 + secrets.randbits(61)
    _known[key] = weakref.ref(array, lambda _: _known.pop(key, None)), number
    return Content(number, is_known=False)


def contents_of(arrays: Sequence[Any], types: Mapping[tuple[Any, Any], Sequence[int]], dtype: Any) -> list[Content]:
    """Return the content of each array, as `content_of` does. `types` has the positions of the arrays of each type."""
    contents = [_SMALL] * len(arrays)
    for (_, aval), positions in types.items():
        if math.prod(aval.shape) * aval.dtype.itemsize >= MIN_BYTES:
            for position in positions:
                contents[position] = content_of(arrays[position], dtype)
    return contents


def reads(sizes: Sequence[int], have: Mapping[int, Any]) -> list[range]:
    """Return the ranges of arrays to read if the arrays in `have` need not be read.

    There are at most `MAX_READS` ranges. So the smallest arrays in `have` may be in them all the same.

    Args:
      sizes: of all arrays in bytes.
      have: arrays by their number.
    """
    ranges: list[range] = []
    for number in range(len(sizes)):
        if number in have:
            continue
        if ranges and ranges[-1].stop == number:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    gaps = [sum(sizes[before.stop : after.start]) for before, after in itertools.pairwise(ranges)]
    cuts = sorted(sorted(range(len(gaps)), key=lambda gap: -gaps[gap])[: MAX_READS - 1])
    firsts = [0, *(cut + 1 for cut in cuts)]
    lasts = [*cuts, len(ranges) - 1]
    return [range(ranges[i].start, ranges[j].stop) for i, j in zip(firsts, lasts, strict=True)] if ranges else []
