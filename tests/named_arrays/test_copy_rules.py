"""Tests of which arrays need a copy, which devices a copy helps, and which type it has."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ir.types import ArraySpec, Even, Opaque, Replicated, Sharding, Tiled, Tiling, shard_boxes
from atoll.named_arrays.copy_rules import independent, type_of_copy, useful_islands


def islands(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


@pytest.mark.parametrize(
    ("copies", "count"),
    [
        ([], 0),
        ([islands(0)], 1),
        ([islands(0), islands(0)], 1),
        ([islands(0), islands(1)], 2),
        ([islands(0, 1)], 1),
        ([islands(0, 1), islands(0)], 1),
        ([islands(0, 1), islands(0), islands(1)], 2),
    ],
)
def test_copies_that_share_an_island_count_once(copies: list[frozenset[int]], count: int) -> None:
    assert independent(copies) == count


@pytest.mark.parametrize(
    ("copies", "wanted", "useful"),
    [
        ([islands(0)], 1, []),
        ([islands(0)], 2, [1, 2]),
        ([islands(0), islands(1)], 2, []),
        ([islands(0, 1)], 2, [2]),
        ([islands(0, 1), islands(2)], 3, [0, 1]),
        ([islands(0, 1, 2)], 2, [0, 1, 2]),
        ([islands(0, 1, 2), islands(1)], 2, [0, 2]),
        ([islands(0, 1, 2)], 1, []),
        ([], 1, [0, 1, 2]),
    ],
)
def test_the_islands_on_which_a_copy_helps(copies: list[frozenset[int]], wanted: int, useful: list[int]) -> None:
    assert useful_islands(copies, wanted, (0, 1, 2)) == useful


def spec(shape: tuple[int, ...], devices: int, tiling: Tiling) -> ArraySpec:
    return ArraySpec("float32", shape, Sharding(tuple(range(devices)), tiling))


def test_a_replicated_array_has_one_shard_in_its_copy_and_arrays_take_turns() -> None:
    array = spec((4,), 3, Replicated())
    places = [type_of_copy(array, (7, 8), turn) for turn in range(3)]
    assert places == [(ArraySpec("float32", (4,), Sharding((device,), Replicated())), True) for device in (7, 8, 7)]


def test_replicas_of_tiles_are_not_copied() -> None:
    array = spec((4,), 4, Tiled((2, 2), (0, 1, 2, 3)))
    assert type_of_copy(array, (5, 6, 7), 0) == (
        ArraySpec("float32", (4,), Sharding((5, 6), Tiled((2,), (0, 1)))),
        True,
    )


def test_the_shards_of_an_array_with_unknown_positions_stay_as_they_are() -> None:
    array = spec((2, 4), 2, Even((1, 4)))
    assert type_of_copy(array, (5, 6, 7), 1) == (ArraySpec("float32", (2, 4), Sharding((5, 6), Even((1, 4)))), False)
    assert type_of_copy(array, (5,), 0) is None


def test_an_opaque_array_has_no_copy() -> None:
    assert type_of_copy(spec((2,), 1, Opaque()), (5,), 0) is None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), max_size=3), st.integers(1, 9), st.integers(0, 9))
def test_a_copy_has_each_element_once(axes: list[tuple[int, int]], devices: int, turn: int) -> None:
    shape, dims = tuple(size for size, _ in axes), tuple(count for _, count in axes)
    count = math.prod(dims)
    array = spec(shape, count, Tiled(dims, tuple(range(count))))
    made = type_of_copy(array, tuple(range(100, 100 + devices)), turn)
    assert made is not None
    copy, _ = made
    assert len(set(copy.sharding.devices)) == len(copy.sharding.devices) <= devices
    elements = sum(math.prod(stop - start for start, stop in box) for box in shard_boxes(copy.sharding, shape))
    assert elements == math.prod(shape)
