"""The mesh of an island's devices, and its sub-meshes, which slices can use.

An island's devices are the points of a mesh of one to three dimensions, in row-major order. The mesh is that of the
platform's coordinates, or that of the cluster's settings, or a line. A slice of a given shape is an axis-aligned box of
the mesh, with its axes in any order. Boxes do not wrap around.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

Shape = tuple[int, ...]

MAX_RANK = 3


def parse_mesh(text: str) -> Shape:
    """Parse text such as "4x4", or "" for a line. Raise ValueError for other text."""
    if not text:
        return ()
    parts = text.lower().split("x")
    if len(parts) > MAX_RANK or not all(p.isascii() and p.isdigit() and 0 < int(p) < 1 << 20 for p in parts):
        raise ValueError(f"invalid device mesh {text!r}: expected up to {MAX_RANK} numbers, such as 4x4 or 2x2x2")
    return tuple(map(int, parts))


def text_of(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def mesh_of(coordinates: Sequence[Shape], declared: Shape = ()) -> tuple[Shape, tuple[int, ...]]:
    """Return an island's mesh, and the index of the device at each point, in row-major order.

    `coordinates` are those of the platform, per device. They are used only if they are distinct and fill a box of more
    than one dimension. Otherwise, the mesh is the declared one, or a line.
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
    """Return the coordinates of the point with this number in row-major order."""
    coordinates = []
    for size in reversed(mesh):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def boxes(mesh: Shape, shape: Shape) -> Iterator[tuple[int, ...]]:
    """Yield the sub-meshes of a shape, as the numbers of their points in the row-major order of `shape`.

    Each set of points is yielded once, with axes in the order of the mesh if possible.
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
    """Return the shapes of `count` devices that fit into the mesh with axes in order, the most compact first."""
    found = [
        shape
        for shape in itertools.product(*([d for d in range(1, size + 1) if count % d == 0] for size in mesh))
        if math.prod(shape) == count
    ]
    return sorted(found, key=lambda shape: (sum(shape), shape))


def is_box(points: Sequence[int], mesh: Shape, shape: Shape) -> bool:
    """Return whether the points, in this order, are a sub-mesh of the shape."""
    return any(tuple(points) == box for box in _anchored(points, mesh, shape))


def _anchored(points: Sequence[int], mesh: Shape, shape: Shape) -> Iterator[tuple[int, ...]]:
    """Yield the boxes of the shape that begin at the first of the points, with axes in every order."""
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
