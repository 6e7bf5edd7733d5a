"""Divides a read of many arrays into one read per host, and assembles the contents that the hosts send.

No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from atoll.errors import Code, StatusError
from atoll.ir.types import ArraySpec, Box, Replicated, Shape, Sharding, shard_boxes
from atoll.protocol.questions import MAX_CONTENTS, MAX_SHARDS
from atoll.transfers.dtypes import numpy_dtype


class Part(NamedTuple):
    """The elements `slices` of an array, which form an array of `shape`: the shard at `position` of its sharding."""

    position: int
    slices: tuple[slice, ...]
    shape: Shape


class HostRead(NamedTuple):
    """Parts that one host sends, one after the other: `parts[i]` of array `arrays[i]` of the read.

    `devices` are the devices of the host that have the parts. `nbytes` is the size of all parts.
    """

    devices: tuple[int, ...]
    arrays: tuple[int, ...]
    parts: tuple[Part, ...]
    nbytes: int


def is_whole(spec: ArraySpec) -> bool:
    """Return whether each shard is the whole array."""
    return isinstance(spec.sharding.tiling, Replicated) or len(spec.sharding.devices) == 1


def divide(specs: Sequence[ArraySpec], host_of: Callable[[int], int]) -> tuple[HostRead, ...]:
    """Return the reads of arrays. Each element of an array is in one part, of the first shard that has the element.

    Raise UNIMPLEMENTED if only the client knows the positions of the shards, RESOURCE_EXHAUSTED if there are too many
    parts or bytes for one answer, and INVALID_ARGUMENT if an array of the dtype holds no data.

    Args:
      specs: the types of the arrays.
      host_of: returns the host of a device.
    """
    found: dict[int, list[tuple[int, int, Part, int]]] = {}
    by_device: dict[int, list[tuple[int, int, Part, int]]] = {}  # the list of the device's host
    count = total = 0
    for number, spec in enumerate(specs):
        itemsize, devices = numpy_dtype(spec.dtype).itemsize, spec.sharding.devices
        parts = _whole(spec.shape) if is_whole(spec) else _parts(spec.sharding, spec.shape)
        count += len(parts)
        total += itemsize * sum([elements for _, elements in parts])
        if count > MAX_SHARDS:
            raise StatusError(
                Code.RESOURCE_EXHAUSTED, f"the arrays have too many shards for one answer: the limit is {MAX_SHARDS}"
            )
        for part, elements in parts:
            device = devices[part.position]
            of_host = by_device.get(device)
            if of_host is None:
                of_host = by_device[device] = found.setdefault(host_of(device), [])
            of_host.append((number, device, part, elements * itemsize))
    if total > MAX_CONTENTS:
        raise StatusError(
            Code.RESOURCE_EXHAUSTED, f"{total} bytes are too many for one answer: the limit is {MAX_CONTENTS} bytes"
        )
    return tuple(_host_read(each) for each in found.values())


def _host_read(found: Sequence[tuple[int, int, Part, int]]) -> HostRead:
    arrays, devices, parts, sizes = zip(*found, strict=True)
    return HostRead(tuple(dict.fromkeys(devices)), arrays, parts, sum(sizes))


def assemble(specs: Sequence[ArraySpec], reads: Sequence[HostRead], contents: Sequence[bytes]) -> bytes:
    """Return the contents of the arrays in row-major order, one array after the other.

    Raise INTERNAL if a host has sent another number of bytes.

    Args:
      specs: the types of the arrays.
      reads: the reads that `divide` returned for these types.
      contents: the bytes that the host of each read has sent.
    """
    for read, content in zip(reads, contents, strict=True):
        if len(content) != read.nbytes:
            raise StatusError(Code.INTERNAL, f"a host sent {len(content)} bytes of arrays instead of {read.nbytes}")
    if len(reads) == 1 and len(reads[0].parts) == len(specs):
        return contents[0]  # one part per array, in their order
    whole = bytearray(sum([read.nbytes for read in reads]))
    arrays = []
    start = 0
    for spec in specs:
        array: np.ndarray[Any, Any] = np.ndarray(spec.shape, numpy_dtype(spec.dtype), whole, start)
        arrays.append(array)
        start += array.nbytes
    for read, content in zip(reads, contents, strict=True):
        start = 0
        for number, (_, slices, shape) in zip(read.arrays, read.parts, strict=True):
            array = arrays[number]
            part: np.ndarray[Any, Any] = np.ndarray(shape, array.dtype, content, start)
            array[slices] = part
            start += part.nbytes
    return bytes(whole)


@lru_cache(maxsize=1024)
def _whole(shape: Shape) -> tuple[tuple[Part, int], ...]:
    return (_part(0, tuple([(0, size) for size in shape])),)


@lru_cache(maxsize=1024)
def _parts(sharding: Sharding, shape: Shape) -> tuple[tuple[Part, int], ...]:
    """Return the different parts of an array, each with its number of elements."""
    first: dict[Box, int] = {}
    for position, box in enumerate(shard_boxes(sharding, shape)):
        first.setdefault(box, position)
    return tuple([_part(position, box) for box, position in first.items()])


def _part(position: int, box: Box) -> tuple[Part, int]:
    shape = tuple([stop - start for start, stop in box])
    return Part(position, tuple([slice(start, stop) for start, stop in box]), shape), math.prod(shape)
