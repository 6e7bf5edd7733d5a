"""Tests of the devices and shardings of copies."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.elastic.data_parallel import rows_per_island
from atoll.elastic.replica import moved_sharding, other_island

P = PartitionSpec


class Named:
    """Sharding on devices that need not exist. `moved_sharding` uses no other properties."""

    def __init__(self, count: int, replicated: bool) -> None:
        self.memory_kind = None
        self.is_fully_replicated = replicated
        self.count = count


@pytest.fixture
def device() -> Any:
    return jax.devices("cpu")[0]


def test_on_as_many_devices_a_sharding_is_the_same_device_for_device(device: Any) -> None:
    mesh = Mesh(np.array([[device]]), ("x", "y"))
    there = moved_sharding(NamedSharding(mesh, P("x", None)), (4, 4), [device])
    assert there == NamedSharding(mesh, P("x", None))
    assert moved_sharding(SingleDeviceSharding(device), (4,), [device]) == SingleDeviceSharding(device)


@pytest.mark.parametrize(
    ("shape", "replicated", "spec"),
    [
        ((3, 7), False, P("devices")),  # one device can hold any shape
        ((3, 7), True, P()),
        ((), False, P()),
    ],
)
def test_on_others_what_was_cut_is_cut_and_what_was_whole_is_whole(
    device: Any, shape: tuple[int, ...], replicated: bool, spec: PartitionSpec
) -> None:
    there = moved_sharding(Named(2, replicated), shape, [device])
    wanted = P(None, "devices") if spec == P("devices") else spec  # divided along the longest dimension
    assert there.spec == wanted


@pytest.mark.parametrize(
    ("home", "working", "sizes", "there"),
    [
        (0, (0, 1, 2), {0: 2, 1: 2, 2: 2}, 1),
        (2, (0, 1, 2), {0: 2, 1: 2, 2: 2}, 0),
        (1, (0, 1), {0: 2, 1: 2, 2: 2}, 0),
        (0, (0, 1, 2), {0: 2, 1: 4, 2: 2}, 2),
        (0, (0, 1), {0: 2, 1: 4}, 1),
        (0, (0,), {0: 2, 1: 2}, None),
    ],
)
def test_the_other_copy_is_on_the_next_island_that_is_alike(
    home: int, working: tuple[int, ...], sizes: dict[int, int], there: int | None
) -> None:
    assert other_island(home, working, sizes) == there


@given(st.integers(1, 500), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_rows_are_dealt_evenly_to_the_devices(rows: int, sizes: list[int]) -> None:
    try:
        counts = rows_per_island(rows, sizes)
    except ValueError:
        assume(False)
    assert sum(counts) == rows
    each = [count / size for count, size in zip(counts, sizes, strict=True)]
    assert all(rate.is_integer() for rate in each)
    assert min(each) >= 1
    assert max(each) - min(each) <= 1


def test_rows_that_cannot_be_dealt_are_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 7 rows cannot be divided among islands of 2, 2 devices"):
        rows_per_island(7, [2, 2])
    with pytest.raises(ValueError, match="a batch of 1 row cannot"):
        rows_per_island(1, [1, 1])


def test_twelve_rows_fit_any_number_of_islands_up_to_four() -> None:
    assert [rows_per_island(12, [1] * count) for count in (1, 2, 3, 4)] == [(12,), (6, 6), (4, 4, 4), (3, 3, 3, 3)]
