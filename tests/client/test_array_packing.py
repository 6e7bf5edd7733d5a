"""Tests of which small arrays are packed."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from atoll.client.array_packing import FEWEST, by_type, groups


@pytest.mark.parametrize(
    ("dtype", "is_packed"),
    [("bool", True), ("int8", True), ("float8_e5m2", True), ("float32", True), ("int2", False), ("int4", False)],
)
def test_numbers_of_less_than_8_bits_are_not_packed(dtype: str, is_packed: bool) -> None:
    arrays = [jnp.zeros(4, dtype) for _ in range(FEWEST)]
    assert groups(by_type(arrays)) == ([(list(range(FEWEST)), FEWEST)] if is_packed else [])
