"""Tests of which small arrays are packed."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from atoll.client.array_packing import FEWEST, by_type, groups


def grouped(arrays: Sequence[jax.Array]) -> list[tuple[list[int], int]]:
    return groups(by_type([each.sharding for each in arrays], [each.aval for each in arrays]))


@pytest.mark.parametrize(
    ("dtype", "is_packed"),
    [("bool", True), ("int8", True), ("float8_e5m2", True), ("float32", True), ("int2", False), ("int4", False)],
)
def test_numbers_of_less_than_8_bits_are_not_packed(dtype: str, is_packed: bool) -> None:
    arrays = [jnp.zeros(4, dtype) for _ in range(FEWEST)]
    assert grouped(arrays) == ([(list(range(FEWEST)), FEWEST)] if is_packed else [])


@pytest.mark.parametrize(
    ("count", "size", "packs"),
    [(32, 32, 1), (33, 32, 2), (85, 32, 3), (86, 128, 1), (130, 32, 5), (171, 128, 2), (341, 128, 3), (342, 512, 1),
     (600, 128, 5), (10_000, 512, 20)],
)  # fmt: skip
def test_all_packs_have_the_largest_size_that_needs_little_padding(count: int, size: int, packs: int) -> None:
    found = grouped([jnp.zeros(4)] * count)
    assert [positions for some, _ in found for positions in some] == list(range(count))
    assert [of for _, of in found] == [size] * packs
