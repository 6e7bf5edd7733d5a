"""Tests of the meshes of islands, and of the sub-meshes of slices."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cluster.mesh import boxes, compact_shapes, is_box, mesh_of, parse_mesh, point

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def test_meshes_are_read_as_people_write_them():
    assert parse_mesh("4x4") == (4, 4)
    assert parse_mesh("2X2x2") == (2, 2, 2)
    assert parse_mesh("") == ()


@pytest.mark.parametrize("text", ["4x", "0x4", "-1x4", "2x2x2x2", "four", "4 x 4", "9999999", "x"])
def test_what_is_no_mesh_is_refused(text: str):
    with pytest.raises(ValueError, match="invalid device mesh"):
        parse_mesh(text)


def test_an_island_has_the_mesh_of_its_platforms_coordinates():
    coordinates = [(x, y, 0, 0) for y in range(2) for x in range(3)]
    mesh, order = mesh_of(coordinates, (6,))
    assert mesh == (3, 2)
    assert [coordinates[i] for i in order] == [(x, y, 0, 0) for x in range(3) for y in range(2)]


def test_cores_of_one_chip_are_neighbours():
    assert mesh_of([(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (1, 0, 0, 1)])[0] == (2, 2)


def test_coordinates_that_say_nothing_leave_the_declared_mesh_or_a_line():
    line = [(i, 0, 0, 0) for i in range(4)]
    twice = [(i, 0, 0, 0) for i in (0, 1, 0, 1)]  # two CPU hosts, each of which numbers its devices from 0
    assert mesh_of(line, (2, 2)) == ((2, 2), (0, 1, 2, 3))
    assert mesh_of(twice, (2, 2))[0] == (2, 2)
    assert mesh_of(twice)[0] == (4,)
    assert mesh_of(line, (3, 3))[0] == (4,)


def test_the_boxes_of_a_mesh():
    assert list(boxes((4,), (2,))) == [(0, 1), (1, 2), (2, 3)]
    assert list(boxes((2, 2), (2, 2))) == [(0, 1, 2, 3)]
    # Lines across the mesh come first, and then lines along it: they are sorted by axis.
    assert list(boxes((2, 3), (2,))) == [(0, 3), (1, 4), (2, 5), (0, 1), (1, 2), (3, 4), (4, 5)]
    # A slice of 3x2 is laid across a mesh of 2x3, with its devices in the order of the slice.
    assert list(boxes((2, 3), (3, 2))) == [(0, 3, 1, 4, 2, 5)]
    assert list(boxes((2, 2), (2, 1, 2))) == [(0, 1, 2, 3)]
    assert not list(boxes((4,), (2, 2)))
    assert not list(boxes((2, 2), (4,)))
    assert list(boxes((3,), (1,))) == [(0,), (1,), (2,)]


@given(SHAPES, SHAPES)
def test_each_box_is_a_sub_mesh_and_each_set_of_points_comes_once(mesh: tuple[int, ...], shape: tuple[int, ...]):
    found = list(boxes(mesh, shape))
    assert len({frozenset(box) for box in found}) == len(found)
    wide = [size for size in shape if size > 1]
    for box in found:
        assert len(box) == len(set(box)) == math.prod(shape)
        assert is_box(box, mesh, shape)
        points = [point(i, mesh) for i in box]
        extents = [max(axis) - min(axis) + 1 for axis in zip(*points, strict=True)]
        assert sorted(e for e in extents if e > 1) == sorted(wide)
        # Neighbors in the slice are neighbors in the mesh.
        grid = dict(zip(itertools.product(*(range(size) for size in shape)), points, strict=True))
        for at, where in grid.items():
            for axis in range(len(shape)):
                beside = grid.get((*at[:axis], at[axis] + 1, *at[axis + 1 :]))
                assert beside is None or sum(abs(a - b) for a, b in zip(where, beside, strict=True)) == 1
    fits = any(
        all(size <= mesh[axis] for size, axis in zip(wide, axes, strict=True))
        for axes in itertools.permutations(range(len(mesh)), len(wide))
    )
    assert bool(found) == fits


def test_compact_shapes_come_first():
    assert compact_shapes((4, 4), 4) == [(2, 2), (1, 4), (4, 1)]
    assert compact_shapes((4, 4), 5) == []
    assert compact_shapes((8,), 3) == [(3,)]


@pytest.mark.parametrize("points", [(1, 0), (0, 1, 2), (0, 2), (3, 4), (-1, 0), ()])
def test_other_points_are_no_box(points: tuple[int, ...]):
    assert not is_box(points, (4,), (2,))
