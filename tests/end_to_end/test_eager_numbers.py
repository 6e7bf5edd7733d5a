"""Tests of eager operations with Python numbers: the results of stock JAX, without a transfer for each operation.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.end_to_end.remote_python import RemotePython


def operations(dtype: str, shape: tuple[int, ...], device: int | None) -> Any:
    """Return the results of all operators with numbers, twice, because the second time uses constants."""
    x, found = jnp.full(shape, 7, dtype), []
    x = x if device is None else jax.device_put(x, jax.devices()[device])
    for _ in range(2):
        made = [x + 2, 2 + x, x - 2.5, 2.5 - x, x * 2, 2.0 * x, x / 2, 2 / (x + 1), x // 2, x % 2]
        made += [x == 7, x != 7, x < 7, x <= 7.0, x > 7, x >= 7, x * -0.0, x + 0]
        found += [(np.asarray(y), y.weak_type, y.committed, [each.id for each in y.devices()]) for y in made]
    return found


def in_transformations() -> Any:
    """Return the numbers in traces that also use untraced arrays."""
    x = jnp.float32(3)
    x * 5, x * 5
    return str(jax.make_jaxpr(lambda y: y + x * 5)(x)), float(jax.grad(lambda y: y * (x * 5) * 5)(x))


def lines() -> str:
    """Return a trace with the source line of each operation, all of which use untraced arrays."""
    ones = jnp.ones(3, jnp.float32)
    return jax.make_jaxpr(lambda y: 2 / ones + ones * y)(ones).pretty_print(source_info=True)


def with_checks() -> list[str]:
    """Return which operations are errors, after JAX has left checks off in this thread and has used the numbers."""
    ones = jnp.ones(2, jnp.float32)
    with jax.debug_nans(False):
        ones * 2.0, ones * 2.0
    found = []
    for name, x in (("jax_debug_nans", 0.0), ("jax_debug_infs", 1.0), ("jax_debug_infs", 1.0)):
        jax.config.update(name, True)
        try:
            (jnp.full(2, x, jnp.float32) / 0.0).block_until_ready()
        except FloatingPointError:
            found.append(name)
        ones / 2.0
        jax.config.update(name, False)
    return found


def deleted() -> float:
    x = jnp.float32(3)
    before = [*map(id, jax.live_arrays())]
    x * 7, x * 7
    for each in jax.live_arrays():
        if id(each) not in before:
            each.delete()
    return float(x * 7)


def converted() -> int:
    """Return how many constants the operations of a loop create."""
    from atoll.client.jax_patches.number_operands import CONSTANTS

    x = jnp.float32(3)
    before = len(CONSTANTS)
    for _ in range(10):
        x = x / 37
    return len(CONSTANTS) - before


@pytest.mark.parametrize(
    ("dtype", "shape", "device"),
    [
        ("int8", (), None),
        ("float64", (4,), 1),
        pytest.param("float16", (), None, marks=pytest.mark.thorough),
        pytest.param("bool", (), 1, marks=pytest.mark.thorough),
    ],
)
def test_the_results_are_those_of_stock_jax(
    same_as_stock: Callable[..., None], dtype: str, shape: tuple[int, ...], device: int | None
) -> None:
    same_as_stock(operations, dtype, shape, device)


def test_traces_are_those_of_stock_jax(same_as_stock: Callable[..., None]) -> None:
    same_as_stock(in_transformations)


def test_source_lines_are_those_of_stock_jax(same_as_stock: Callable[..., None]) -> None:
    same_as_stock(lines)


def test_forbidden_results_are_found_as_by_stock_jax(same_as_stock: Callable[..., None]) -> None:
    same_as_stock(with_checks)


def test_deleting_all_arrays_does_no_harm(atoll_python: RemotePython) -> None:
    assert atoll_python.call(deleted) == 21


def test_a_loop_makes_one_array_of_its_number(atoll_python: RemotePython) -> None:
    assert atoll_python.call(converted) == 1
