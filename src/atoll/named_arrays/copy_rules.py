"""Rules for copies of published arrays: when an array needs one, on which islands it helps, and of which type it is.

An array survives the loss of an island if one of its copies has no shard there. So copies count only as far as they
share no island. A copy has the tiles of the array on the devices of one island, and each tile once. If the island has
fewer devices than the array has tiles, the tiles of the copy are larger.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from atoll.ir.types import ArraySpec, Even, Opaque, Replicated, Tiled, Tiling, Uneven

Islands = frozenset[int]  # that have shards of one copy


def independent(copies: Iterable[Islands]) -> int:
    """Return the number of copies of which no two are on the same island. Copies on few islands are counted first."""
    taken: set[int] = set()
    count = 0
    for islands in sorted(copies, key=len):
        if taken.isdisjoint(islands):
            taken |= islands
            count += 1
    return count


def useful_islands(copies: Sequence[Islands], wanted: int, among: Collection[int]) -> list[int]:
    """Return the islands on which one more copy of an array would help; none if it has enough copies.

    A copy of an array that spans islands may help only together with further copies on these islands.

    Args:
      copies: the islands of the copies that stay.
      wanted: the number of copies that share no island.
      among: the islands that can take copies.
    """
    have = independent(copies)
    if have >= wanted:
        return []
    alone = {island: frozenset({island}) for island in among}
    found = [island for island, islands in alone.items() if independent([*copies, islands]) > have]
    if not found and independent([*copies, *alone.values()]) > have:
        found = [island for island, islands in alone.items() if islands not in copies]
    return found


def type_of_copy(spec: ArraySpec, devices: Sequence[int], turn: int) -> tuple[ArraySpec, bool] | None:
    """Return the type of a copy on some of these devices, and whether the transfer to it changes the shards.

    Return None if that is not possible. `turn` is a number that differs for each array: arrays with few tiles are put
    on different devices.
    """
    sharding, count = spec.sharding, len(devices)
    tiling: Tiling
    match sharding.tiling:
        case Replicated():
            tiling, shards = Replicated(), 1
        case Tiled(dims=dims):
            tiles = _at_most(dims[: len(spec.shape)], count)
            shards = math.prod(tiles)
            tiling = Tiled(tiles, tuple(range(shards))) if shards > 1 else Replicated()
        case Even() | Uneven() if len(sharding.devices) <= count:
            return replace(spec, sharding=replace(sharding, devices=tuple(devices[: len(sharding.devices)]))), False
        case Even() | Uneven() | Opaque():
            return None
    first = turn * shards % count
    chosen = tuple(devices[(first + shard) % count] for shard in range(shards))
    return replace(spec, sharding=replace(sharding, devices=chosen, tiling=tiling)), True


def _at_most(dims: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return numbers of tiles per dimension whose product is at most `count`, by joining tiles."""
    tiles = list(dims)
    while math.prod(tiles) > count:
        largest = tiles.index(max(tiles))
        size = tiles[largest]
        tiles[largest] = size // next(each for each in range(2, size + 1) if size % each == 0)
    return tuple(tiles)
