"""Arrays and shardings as programs see them: dtype, shape, and which device holds which part.

A sharding is an ordered list of devices and a *tiling*: the rule that tells what part of the array each position of the
list holds. Tilings stay compact (a tile assignment is not expanded to one entry per shard) until `shard_boxes` asks.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec

from atoll.errors import invalid, unimplemented

Shape = tuple[int, ...]
ShardType = tuple[str, Shape]  # dtype and shape of one shard
Box = tuple[tuple[int, int], ...]  # (start, stop) in elements, for each dimension


class Replicated(msgspec.Struct, frozen=True, array_like=True, tag="r", gc=False):
    """Each device holds the whole array. A single-device array is one of these."""


class Tiled(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The array is cut into `dims` tiles a dimension, in row-major order of tiles.

    Tile number p belongs to position `order[p]` of the device list. Where `dims` has more entries than the array has
    dimensions, the trailing ones enumerate replicas of the same tile.
    """

    dims: Shape
    order: tuple[int, ...]


class Even(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """Each shard has `shard_shape`; where the shards lie in the array is the client's affair (pmap)."""

    shard_shape: Shape


class Uneven(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Shard i has `shard_shapes[i]`; where the shards lie in the array is the client's affair."""

    shard_shapes: tuple[Shape, ...]


class Opaque(msgspec.Struct, frozen=True, array_like=True, tag="o", gc=False):
    """Nothing is known of the shards but the devices they are on."""


Tiling = Replicated | Tiled | Even | Uneven | Opaque


class Sharding(msgspec.Struct, frozen=True, array_like=True):
    """`devices[i]` (ids of virtual devices) holds shard i; `memory_kind` "" is the devices' default."""

    devices: tuple[int, ...]
    tiling: Tiling = Replicated()
    memory_kind: str = ""


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """A logical buffer's type. `layout` is major-to-minor, or None for the platform's default."""

    dtype: str
    shape: Shape
    sharding: Sharding
    layout: tuple[int, ...] | None = None


def shard_shape(sharding: Sharding, shape: Shape, position: int) -> Shape:
    """The shape of the shard at `position` of the device list."""
    match sharding.tiling:
        case Replicated():
            return shape
        case Tiled():
            return tuple(stop - start for start, stop in shard_boxes(sharding, shape)[position])
        case Even(shard_shape=each):
            return each
        case Uneven(shard_shapes=shapes):
            return shapes[position]
    raise unimplemented("the shards of an opaque sharding have no known shape")


@lru_cache(maxsize=4096)
def shard_boxes(sharding: Sharding, shape: Shape) -> tuple[Box, ...]:
    """What each position of the device list holds, as one box a shard. Raises where the tiling does not say."""
    whole = tuple((0, size) for size in shape)
    match sharding.tiling:
        case Replicated():
            return (whole,) * len(sharding.devices)
        case Tiled(dims=dims, order=order):
            return _tile_boxes(dims, order, len(sharding.devices), shape)
        case Even(shard_shape=each) if len(sharding.devices) == 1 and each == shape:
            return (whole,)
        case Uneven(shard_shapes=(only,)) if only == shape:
            return (whole,)
    raise unimplemented(
        "this array's sharding does not say where its shards lie; disassemble it into single-device arrays first"
    )


def _tile_boxes(dims: Shape, order: tuple[int, ...], devices: int, shape: Shape) -> tuple[Box, ...]:
    rank = len(shape)
    if len(dims) < rank or min(dims, default=1) < 1 or math.prod(dims) != devices or len(order) != devices:
        raise invalid(f"tile assignment {dims} over {len(order)} devices does not fit shape {shape} on {devices}")
    tile = [-(-size // count) for size, count in zip(shape, dims, strict=False)]
    boxes: list[Box | None] = [None] * devices
    for number, position in enumerate(order):
        coordinates = []
        rest = number
        for count in reversed(dims):
            rest, coordinate = divmod(rest, count)
            coordinates.append(coordinate)
        coordinates.reverse()
        if not 0 <= position < devices or boxes[position] is not None:
            raise invalid(f"tile assignment names position {position} twice or out of range")
        boxes[position] = tuple(
            (min(c * t, size), min((c + 1) * t, size)) for c, t, size in zip(coordinates, tile, shape, strict=False)
        )
    return tuple(box for box in boxes if box is not None)


# Bits an element takes on a device, by dtype; names are NumPy's, and ml_dtypes' where NumPy has none.
DTYPE_BITS = {
    "bool": 8,
    "int1": 1,
    "int2": 2,
    "int4": 4,
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "uint1": 1,
    "uint2": 2,
    "uint4": 4,
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
    "uint64": 64,
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
    "complex64": 64,
    "complex128": 128,
    "float8_e3m4": 8,
    "float8_e4m3": 8,
    "float8_e4m3fn": 8,
    "float8_e4m3b11fnuz": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1fn": 4,
    "float6_e2m3fn": 8,
    "float6_e3m2fn": 8,
    "token": 0,
    "opaque": 0,
    "string": 0,
}


# Of numbers that decide which program runs.
NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def nbytes(spec: ArraySpec | None) -> int:
    """What the array takes on all its devices together, in bytes; 0 where nobody can say."""
    if spec is None or isinstance(spec.sharding.tiling, Opaque):
        return 0
    shards = len(spec.sharding.devices)
    if isinstance(spec.sharding.tiling, Uneven):
        elements = sum(math.prod(each) for each in spec.sharding.tiling.shard_shapes)
    else:
        elements = shards * math.prod(shard_shape(spec.sharding, spec.shape, 0)) if shards else 0
    return elements * DTYPE_BITS[spec.dtype] // 8
