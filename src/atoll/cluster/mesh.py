"""The mesh of an island's devices, and the sub-meshes that a slice can be.

An island's devices stand in row-major order at the points of a mesh of one to three dimensions: the one of
its platform (coordinates), or the one that the cluster was started with, or a line. A slice of a given shape
is an axis-aligned box of it, with its axes in any order; nothing wraps around.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

Shape = tuple[int, ...]

MAX_RANK = 3


def parse_mesh(text: str) -> Shape:
    """Reads `4x4`, or "" for a line. Raises ValueError."""
    if not text:
        return ()
    parts = text.lower().split("x")
    if len(parts) > MAX_RANK or not all(p.isascii() and p.isdigit() and 0 < int(p) < 1 << 20 for p in parts):
        raise ValueError(f"{text!r} is no mesh of devices: expected up to {MAX_RANK} numbers, such as 4x4 or 2x2x2")
    return tuple(map(int, parts))


def text_of(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def mesh_of(coordinates: Sequence[Shape], declared: Shape = ()) -> tuple[Shape, tuple[int, ...]]:
    """An island's mesh, and which of its devices stands at each point of it, in row-major order.

    `coordinates` are the platform's, one for each device. They count only where each is another and together they fill
    a box of more than one dimension; else the mesh is the declared one, or a line.
    """
    count = len(coordinates)
    if len(set(coordinates)) == count and len(set(map(len, coordinates))) == 1:
        low = [min(axis) for axis in zip(*coordinates, strict=True)]
        sizes = [max(axis) - least + 1 for axis, least in zip(zip(*coordinates, strict=True), low, strict=True)]
        wide = [axis for axis, size in enumerate(sizes) if size > 1]
        if 1 < len(wide) <= MAX_RANK and math.prod(sizes) == count:
            order = sorted(range(count), key=lambda i: coordinates[i])
            return tuple(sizes[axis] for axis in wide), tuple(order)
    if declared and math.prod(declared) == count:
        return declared, tuple(range(count))
    return (count,), tuple(range(count))


def point(index: int, mesh: Shape) -> Shape:
    """The coordinates of a point by its number in row-major order."""
    coordinates = []
    for size in reversed(mesh):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def boxes(mesh: Shape, shape: Shape) -> Iterator[tuple[int, ...]]:
    """The sub-meshes of that shape: their points by number, in the row-major order of `shape`, not of the mesh.

    Each set of points comes once: axes in order where that is possible.
    """
    wide = [size for size in shape if size > 1]
    if len(wide) > len(mesh):
        return
    strides = [math.prod(mesh[axis + 1 :]) for axis in range(len(mesh))]
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for axes in itertools.permutations(range(len(mesh)), len(wide)):
        if any(size > mesh[axis] for size, axis in zip(wide, axes, strict=True)):
            continue
        extent = [1] * len(mesh)
        for size, axis in zip(wide, axes, strict=True):
            extent[axis] = size
        offsets = [
            sum(c * strides[axis] for c, axis in zip(each, axes, strict=True))
            for each in itertools.product(*(range(size) for size in wide))
        ]
        for corner in itertools.product(*(range(m - e + 1) for m, e in zip(mesh, extent, strict=True))):
            first = sum(c * s for c, s in zip(corner, strides, strict=True))
            if (first, tuple(extent)) not in seen:
                seen.add((first, tuple(extent)))
                yield tuple(first + offset for offset in offsets)


def compact_shapes(mesh: Shape, count: int) -> list[Shape]:
    """The shapes of as many devices that fit into the mesh with its axes in order: the most compact first."""
    found = [
        shape
        for shape in itertools.product(*([d for d in range(1, size + 1) if count % d == 0] for size in mesh))
        if math.prod(shape) == count
    ]
    return sorted(found, key=lambda shape: (sum(shape), shape))


def is_box(points: Sequence[int], mesh: Shape, shape: Shape) -> bool:
    """Whether the points, in this order, are a sub-mesh of that shape."""
    return any(tuple(points) == box for box in _anchored(points, mesh, shape))


def _anchored(points: Sequence[int], mesh: Shape, shape: Shape) -> Iterator[tuple[int, ...]]:
    """The boxes of that shape at the first of the points, with its axes in every order."""
    wide = [size for size in shape if size > 1]
    if not points or not all(0 <= each < math.prod(mesh) for each in points):
        return
    strides = [math.prod(mesh[axis + 1 :]) for axis in range(len(mesh))]
    corner = point(points[0], mesh)
    for axes in itertools.permutations(range(len(mesh)), len(wide)):
        if all(corner[axis] + size <= mesh[axis] for size, axis in zip(wide, axes, strict=True)):
            yield tuple(
                points[0] + sum(c * strides[axis] for c, axis in zip(each, axes, strict=True))
                for each in itertools.product(*(range(size) for size in wide))
            )
