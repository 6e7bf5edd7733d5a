"""Converts between the client's buffers and arrays: dtypes, strides, and the boxes of shards in an array.

A client's buffer ranges from the lowest to the highest byte that belongs to an element. Elements smaller than a byte
are sent as one byte each.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from atoll.decodable import decodable
from atoll.errors import invalid
from atoll.ir.types import Box, Shape
from atoll.quantities import counted
from atoll.transfers.dtypes import numpy_dtype
from atoll.transfers.host_memory import aligned
from atoll.wire.framing import NO_MESSAGE

_HEADER_BYTES = 5  # of an array in msgpack


def region_bytes(itemsize: int, shape: Shape, strides: tuple[int, ...] | None) -> tuple[int, int]:
    """Return the size of a buffer and the offset of the element with index 0, both in bytes."""
    if math.prod(shape) == 0:
        return 0, 0
    if strides is None:
        return itemsize * math.prod(shape), 0
    if len(strides) != len(shape):
        raise invalid(f"got {len(strides)} byte strides for an array of {counted(len(shape), 'dimension')}")
    low = high = 0
    for size, stride in zip(shape, strides, strict=True):
        reach = stride * (size - 1)
        low, high = min(low, low + reach), max(high, high + reach)
    return high - low + itemsize, -low


def view(content: Any, dtype: str, shape: Shape, strides: tuple[int, ...] | None) -> np.ndarray[Any, Any]:
    """Return a client's buffer as an array, without a copy except for strings."""
    if dtype == "string":
        return _strings(content, shape)
    kind = numpy_dtype(dtype)
    given = memoryview(content).nbytes
    if strides is None and given and given == math.prod(shape) * kind.itemsize:  # nearly always
        return np.ndarray(shape, kind, content)
    expected, origin = region_bytes(kind.itemsize, shape, strides)
    if given != expected:
        raise invalid(f"a host buffer for {dtype}{list(shape)} must have {expected} bytes, got {given}")
    if not expected:
        return np.empty(shape, kind)
    return np.ndarray(shape, kind, buffer=content, offset=origin, strides=strides)


def empty(shape: Shape, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Allocate an array with an alignment that lets a CPU device use it without a copy."""
    if dtype.kind == "T":
        return np.empty(shape, dtype)
    return aligned(dtype.itemsize * math.prod(shape)).view(dtype).reshape(shape)


def copied(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    fresh = empty(array.shape, array.dtype)
    fresh[...] = array
    return fresh


def cut(array: np.ndarray[Any, Any], box: Box | None) -> np.ndarray[Any, Any]:
    """Return a view of the array inside the box."""
    if box is None:
        return array
    index: tuple[Any, ...] = (*[slice(start, stop) for start, stop in box], ...)
    part: np.ndarray[Any, Any] = array[index]
    return part


def fill(
    target: memoryview,
    dtype: np.dtype[Any],
    shape: Shape,
    strides: tuple[int, ...] | None,
    boxes: tuple[Box, ...],
    shards: list[np.ndarray[Any, Any]],
) -> None:
    """Write the shards into a buffer with the layout `strides`."""
    _, origin = region_bytes(dtype.itemsize, shape, strides)
    whole: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer=target, offset=origin, strides=strides)
    for box, shard in zip(boxes, shards, strict=True):
        whole[tuple(slice(start, stop) for start, stop in box)] = shard


def _strings(content: Any, shape: Shape) -> np.ndarray[Any, Any]:
    count = _string_count(bytes(memoryview(content)[:_HEADER_BYTES]))
    if count is not None and count != math.prod(shape):  # before decoding, which blocks all threads of a worker
        raise invalid(f"got {counted(count, 'string')} for an array of shape {list(shape)}")
    try:
        texts = [text.decode() for text in msgspec.msgpack.decode(bytes(content), type=decodable(list[bytes]))]
    except NO_MESSAGE as error:
        raise invalid(f"a host buffer of strings must contain valid UTF-8: {error}") from None
    flat = np.array(texts, dtype=np.dtypes.StringDType())
    return flat.reshape(shape)


def _string_count(header: bytes) -> int | None:
    """Return the length of an array from its header in msgpack, or None if it is not an array."""
    kind = header[0] if header else 0
    if kind & 0xF0 == 0x90:
        return kind & 0x0F
    size = {0xDC: 2, 0xDD: 4}.get(kind)
    return None if size is None else int.from_bytes(header[1 : 1 + size], "big")


def bytes_of(array: np.ndarray[Any, Any]) -> Any:
    """Return the bytes of a contiguous array without a copy."""
    return array.reshape(-1).view(np.uint8).data if array.size else b""


def encode_strings(array: np.ndarray[Any, Any]) -> bytes:
    """Encode an array of strings in the format that `view` reads."""
    return msgspec.msgpack.encode([str(text).encode() for text in array.reshape(-1)])
