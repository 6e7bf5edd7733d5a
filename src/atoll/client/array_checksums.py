"""Checksums of published arrays. Devices compute them, when arrays are published and when a subscriber verifies them.

An array is cut into a grid of at most 64 cells. The checksum of a cell is the sum, modulo 2**32, of a hash of each of
its elements, which depends on the bits of the element and on its position in the array. A sum does not depend on the
order, so any sharding of the array gives the same checksums, and each device of a subscriber hashes its own shards.

The grid depends on the shape only. Its cells are usually parts of single shards, so that a wrong checksum names the
devices that have wrong bytes. If shards cut a cell, all devices with a part of the cell are named.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.client.array_packing import mesh_of
from atoll.client.client_caches import client_cache
from atoll.ir.types import DTYPE_BITS

_MAX_PER_AXIS = 8
_MAX_CELLS = 64
_Box = tuple[tuple[int, int], ...]  # start and stop in each dimension
_Grid = tuple[int, ...]


def grid_of(shape: Sequence[int]) -> _Grid:
    """Return the number of cells along each dimension."""
    grid: list[int] = []
    for size in shape:
        count = 1
        most = min(_MAX_PER_AXIS, _MAX_CELLS // math.prod(grid))
        while size and size % (2 * count) == 0 and 2 * count <= most:
            count *= 2
        grid.append(count)
    return tuple(grid)


def cells_of(shape: Sequence[int]) -> int:
    return math.prod(grid_of(shape))


# ---- on devices


def _words(block: Any) -> list[Any]:
    """Return the bits of the elements as arrays of uint32 of the same shape."""
    if jnp.issubdtype(block.dtype, jnp.complexfloating):
        return [*_words(block.real), *_words(block.imag)]
    if block.dtype == jnp.bool_:
        return [block.astype(jnp.uint32)]
    bits = DTYPE_BITS[block.dtype.name]
    if bits < 8:
        wide = block.astype(jnp.float32 if jnp.issubdtype(block.dtype, jnp.floating) else jnp.int32)
        return [jax.lax.bitcast_convert_type(wide, jnp.uint32)]
    if bits == 64:
        halves = jax.lax.bitcast_convert_type(block, jnp.uint32)
        return [halves[..., 0], halves[..., 1]]
    return [jax.lax.bitcast_convert_type(block, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)]


def _mixed(word: Any) -> Any:
    """Return a hash of each word (the finalizer of MurmurHash3)."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _sums(block: Any, starts: Any, shape: Sequence[int], grid: _Grid) -> Any:
    """Return the checksums of the cells of a block.

    Args:
      block: a part of an array.
      starts: the position of the block in the array, one uint32 per dimension.
      shape: the shape of the array.
      grid: number of cells of the block along each dimension.
    """
    place = jnp.zeros(block.shape, jnp.uint32)
    for axis in range(block.ndim):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % (1 << 32))
        place += (jax.lax.broadcasted_iota(jnp.uint32, block.shape, axis) + starts[axis]) * stride
    hashed = jnp.zeros(block.shape, jnp.uint32)
    for number, word in enumerate(_words(block)):
        hashed += _mixed(word ^ _mixed(place + jnp.uint32(0x9E3779B9 * (number + 1) % (1 << 32))))
    parts = itertools.chain.from_iterable((count, size // count) for count, size in zip(grid, block.shape, strict=True))
    inner = tuple(range(1, 2 * block.ndim, 2))
    return hashed.reshape(tuple(parts)).sum(axis=inner, dtype=jnp.uint32).ravel()


@client_cache(256)
def _summing_arrays(shapes: tuple[tuple[int, ...], ...], place: Any) -> Any:
    """Return a function that computes the checksums of whole arrays."""

    def atoll_checksums(*arrays: Any) -> Any:
        starts = [np.zeros(len(shape), np.uint32) for shape in shapes]
        found = [_sums(*each, grid_of(each[2])) for each in zip(arrays, starts, shapes, strict=True)]
        return jnp.concatenate(found)

    return jax.jit(atoll_checksums, out_shardings=place)


@client_cache(256)
def _summing_blocks(shapes: tuple[tuple[int, ...], ...], grids: tuple[_Grid, ...]) -> Any:
    """Return a function that computes the checksums of blocks. Its arguments are the blocks, and their positions."""

    def atoll_checksums(blocks: Any, starts: Any) -> Any:
        return jnp.concatenate([_sums(*each) for each in zip(blocks, starts, shapes, grids, strict=True)])

    return jax.jit(atoll_checksums)


# ---- publishers


def checksums(arrays: Sequence[Any]) -> Any:
    """Return the checksums of arrays on the same devices, one array after another. The result is on all devices."""
    plain = [_with_automatic_axes(each) for each in arrays]
    devices = plain[0].sharding._device_assignment
    place = NamedSharding(Mesh(np.array(devices), "all"), PartitionSpec())
    with mesh_of(plain[0].sharding):
        return _summing_arrays(tuple(each.shape for each in plain), place)(*plain)


def _with_automatic_axes(array: Any) -> Any:
    """Return the array on a mesh with automatic axes, since JAX refuses to reshape arrays on explicit axes."""
    mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh) or mesh.are_all_axes_auto:
        return array
    place = NamedSharding(Mesh(mesh.devices, mesh.axis_names), array.sharding.spec)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, place, shards)


# ---- subscribers


def wrong_devices(arrays: Sequence[Any], expected: Sequence[np.ndarray]) -> dict[int, list[int]]:
    """Return the devices that have wrong bytes, by the number of the array.

    Args:
      arrays: what was read.
      expected: the checksums of the cells of each array, which its publisher has computed.
    """
    boxes = [_boxes(each) for each in arrays]
    grids = [_common_grid(each.shape, set(its.values())) for each, its in zip(arrays, boxes, strict=True)]
    found = _computed(arrays, boxes, grids)
    wrong: dict[int, list[int]] = {}
    for number, (array, grid) in enumerate(zip(arrays, grids, strict=True)):
        whole = _coarser(np.asarray(expected[number], np.uint32).reshape(grid_of(array.shape)), grid)
        devices = _wrong(array.shape, whole, boxes[number], found[number])
        if devices:
            wrong[number] = sorted(devices)
    return wrong


def _boxes(array: Any) -> dict[int, _Box]:
    """Return the part of the array on each device."""
    indices = array.sharding.devices_indices_map(array.shape)
    return {
        device.id: tuple(each.indices(size)[:2] for each, size in zip(index, array.shape, strict=True))
        for device, index in indices.items()
    }


def _common_grid(shape: Sequence[int], boxes: set[_Box]) -> _Grid:
    """Return the grid of an array, with one cell along each dimension in which a box cuts a cell."""
    grid = list(grid_of(shape))
    for axis, size in enumerate(shape):
        cell = size // grid[axis]
        if any(bound % cell for box in boxes for bound in box[axis] if cell):
            grid[axis] = 1
    return tuple(grid)


def _coarser(sums: np.ndarray, grid: _Grid) -> np.ndarray:
    """Return the checksums in a grid with fewer cells."""
    axes = tuple(axis for axis, count in enumerate(grid) if count < sums.shape[axis])
    return sums.sum(axis=axes, keepdims=True, dtype=np.uint32)


def _region(shape: Sequence[int], grid: _Grid, box: _Box) -> tuple[slice, ...]:
    """Return the cells that a box covers."""
    found = []
    for size, count, (start, stop) in zip(shape, grid, box, strict=True):
        cell = max(1, size // count)
        found.append(slice(0, 1) if count == 1 else slice(start // cell, stop // cell))
    return tuple(found)


def _computed(
    arrays: Sequence[Any], boxes: Sequence[dict[int, _Box]], grids: Sequence[_Grid]
) -> list[dict[int, np.ndarray]]:
    """Return the checksums of the cells in the part of each array on each device."""
    by_device: dict[int, list[tuple[int, Any]]] = defaultdict(list)
    for number, array in enumerate(arrays):
        for shard in array.addressable_shards if array.size else ():
            if shard.data.size:
                by_device[shard.device.id].append((number, shard.data))
    results: list[tuple[int, list[tuple[int, tuple[int, ...]]], Any]] = []
    for device, blocks in by_device.items():
        starts, cells = [], []
        for number, _ in blocks:
            box = boxes[number][device]
            starts.append(np.array([start for start, _ in box], np.uint32))
            region = _region(arrays[number].shape, grids[number], box)
            cells.append((number, tuple(each.stop - each.start for each in region)))
        shapes = tuple(tuple(arrays[number].shape) for number, _ in blocks)
        sums = _summing_blocks(shapes, tuple(grid for _, grid in cells))
        with mesh_of(blocks[0][1].sharding):
            results.append((device, cells, sums([block for _, block in blocks], starts)))
    found: list[dict[int, np.ndarray]] = [{} for _ in arrays]
    for (device, cells, _), content in zip(results, jax.device_get([sums for *_, sums in results]), strict=True):
        parts = _parts(content, [math.prod(grid) for _, grid in cells])
        for (number, grid), part in zip(cells, parts, strict=True):
            found[number][device] = part.reshape(grid)
    return found


def _parts(content: np.ndarray, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    first = 0
    for size in sizes:
        yield content[first : first + size]
        first += size


def _wrong(
    shape: Sequence[int], expected: np.ndarray, boxes: dict[int, _Box], found: dict[int, np.ndarray]
) -> set[int]:
    """Return the devices whose part of an array is wrong."""
    regions: dict[tuple[tuple[int, int], ...], dict[_Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for device, box in boxes.items():
        if any(start == stop for start, stop in box):
            continue
        region = _region(shape, expected.shape, box)
        regions[tuple((each.start, each.stop) for each in region)][box].append(device)
    wrong: set[int] = set()
    for bounds, its_boxes in regions.items():
        cells = expected[tuple(slice(*each) for each in bounds)]
        if len(its_boxes) == 1:  # the devices have the whole cells
            (devices,) = its_boxes.values()
            wrong.update(device for device in devices if not np.array_equal(found[device], cells))
            continue
        firsts = [found[devices[0]] for devices in its_boxes.values()]
        agree = all(
            np.array_equal(found[each], found[devices[0]]) for devices in its_boxes.values() for each in devices
        )
        if not agree or not np.array_equal(np.sum(firsts, axis=0, dtype=np.uint32), cells):
            wrong.update(device for devices in its_boxes.values() for device in devices)
    return wrong
