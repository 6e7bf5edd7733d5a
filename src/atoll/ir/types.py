"""Types of arrays in programs: dtype, shape and sharding.

A sharding is an ordered list of devices and a *tiling*, which determines the part of the array at each position of the
list. Tilings are compact: only `shard_boxes` expands a tile assignment to one entry per shard.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec

from atoll.errors import invalid, unimplemented

Shape = tuple[int, ...]
ShardType = tuple[str, Shape]  # dtype and shape of one shard
Box = tuple[tuple[int, int], ...]  # (start, stop) in elements, per dimension


class Replicated(msgspec.Struct, frozen=True, array_like=True, tag="r", gc=False):
    """Each device holds the whole array, as for a single-device array."""


REPLICATED = Replicated()


class Tiled(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Each dimension is cut into `dims` tiles. Tiles are numbered in row-major order.

    Tile p is at position `order[p]` of the device list. If `dims` has more entries than the array has dimensions, the
    trailing ones enumerate replicas of the same tile.
    """

    dims: Shape
    order: tuple[int, ...]


class Even(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """Each shard has `shard_shape`. Only the client knows their positions in the array (pmap)."""

    shard_shape: Shape


class Uneven(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Shard i has `shard_shapes[i]`. Only the client knows their positions in the array."""

    shard_shapes: tuple[Shape, ...]


class Opaque(msgspec.Struct, frozen=True, array_like=True, tag="o", gc=False):
    """Only the devices of the shards are known."""


Tiling = Replicated | Tiled | Even | Uneven | Opaque


class Sharding(msgspec.Struct, frozen=True, array_like=True):
    """`devices[i]` (the ID of a virtual device) holds shard i. `memory_kind` "" is the default of the devices."""

    devices: tuple[int, ...]
    tiling: Tiling = Replicated()
    memory_kind: str = ""


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """The type of a logical buffer. `layout` is major-to-minor, or None for the platform's default."""

    dtype: str
    shape: Shape
    sharding: Sharding
    layout: tuple[int, ...] | None = None


def shard_shape(sharding: Sharding, shape: Shape, position: int) -> Shape:
    """Return the shape of the shard at `position` of the device list."""
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
    """Return the box of the array at each position of the device list.

    Raises UNIMPLEMENTED if the tiling does not determine it, and INVALID_ARGUMENT if the tiling is invalid.
    """
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
        "this array's sharding does not specify where its shards are; disassemble it into single-device arrays first"
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
            raise invalid(f"a tile assignment of {devices} devices contains position {position} twice or out of range")
        boxes[position] = tuple(
            (min(c * t, size), min((c + 1) * t, size)) for c, t, size in zip(coordinates, tile, shape, strict=False)
        )
    return tuple(box for box in boxes if box is not None)


_FLOATS_OF_8_BITS = (
    *("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn"),
)
# The bits of an element on a device, by dtype. Names are those of NumPy and ml_dtypes.
DTYPE_BITS = {
    **{f"{sign}int{bits}": bits for sign in ("", "u") for bits in (1, 2, 4, 8, 16, 32, 64)},
    **dict.fromkeys(_FLOATS_OF_8_BITS, 8),
    **dict.fromkeys(("token", "opaque", "string"), 0),
    **{"bool": 8, "float4_e2m1fn": 4, "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64},
    **{"complex64": 64, "complex128": 128},
}


# The dtypes of numbers that control a switch or a loop.
NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def nbytes(spec: ArraySpec | None) -> int:
    """Return the size of the array on all of its devices together; 0 if unknown."""
    if spec is None or isinstance(spec.sharding.tiling, Opaque):
        return 0
    shards = len(spec.sharding.devices)
    if isinstance(spec.sharding.tiling, Uneven):
        elements = sum(math.prod(each) for each in spec.sharding.tiling.shard_shapes)
    else:
        elements = shards * math.prod(shard_shape(spec.sharding, spec.shape, 0)) if shards else 0
    return elements * DTYPE_BITS[spec.dtype] // 8


def contents_nbytes(spec: ArraySpec) -> int:
    """Return the size of the array's contents in bytes, however many devices have a copy of them."""
    return math.prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8
