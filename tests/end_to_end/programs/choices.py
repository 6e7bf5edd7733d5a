"""Functions for two islands with data-dependent control flow. Each takes the library to use: `atoll` or `BY_PYTHON`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.end_to_end.programs.functions import SQUARE, meshes, on


def _switch(index: Any, branches: Any, *operands: Any) -> Any:
    return branches[min(max(int(index), 0), len(branches) - 1)](*operands)


def _while_loop(cond_fun: Any, body_fun: Any, value: Any) -> Any:
    while bool(cond_fun(value)):
        value = body_fun(value)
    return value


# Control flow in Python, which first fetches the number.
BY_PYTHON = SimpleNamespace(
    cond=lambda pred, true_fun, false_fun, *operands: (true_fun if bool(pred) else false_fun)(*operands),
    switch=_switch,
    while_loop=_while_loop,
)

_positive = jax.jit(lambda x: x.sum() > 0)
_double = jax.jit(lambda x: x * 2 + 1)
_product = jax.jit(lambda x: jnp.tanh(x @ x.T))


def _here(x: Any) -> Any:
    return _double(x)


def _there_and_back(x: Any) -> Any:
    _, second = meshes()
    return jax.device_put(_product(jax.device_put(x, on(second, "x", "y"))), x.sharding)


def _square() -> Any:
    first, _ = meshes()
    return jax.device_put(SQUARE, on(first, "x", "y"))


def cond_over_islands(lib: Any) -> Any:
    x = _square()
    results = []
    for step in range(6):
        x = lib.cond(_positive(x - step), _here, _there_and_back, x)
        results.append(x)
    return results


def cond_with_trees(lib: Any) -> Any:
    x = _square()
    weights = jax.device_put(SQUARE.T, x.sharding)

    def true_fun(tree: Any, scale: Any) -> Any:
        return {"a": tree["a"] * scale, "b": (weights, tree["b"])}

    def false_fun(tree: Any, scale: Any) -> Any:
        moved = _there_and_back(tree["a"])
        return {"a": moved, "b": (moved, tree["b"] + np.float32(1))}

    tree = {"a": x, "b": jnp.float32(3)}
    return [lib.cond(pred, true_fun, false_fun, tree, 2.0) for pred in (_positive(x), _positive(x - 9))]


def switch_out_of_range(lib: Any) -> Any:
    x = _square()
    branches = [_here, _there_and_back, lambda x: x]
    return [lib.switch(jax.device_put(np.int32(i), jax.devices()[5]), branches, x) for i in (-4, 0, 1, 2, 9)]


def loop_over_islands(lib: Any) -> Any:
    weights = jax.device_put(SQUARE / 8, on(meshes()[1], "x"))

    def body(carry: Any) -> Any:
        step, x, kept, (a, b) = carry
        moved = jax.device_put(x, on(meshes()[1], "x", "y")) @ weights
        return step + 1, jax.device_put(moved, x.sharding), kept, (b, a + b)

    start = 0, _square(), jnp.float32(2), (jnp.int32(0), jnp.int32(1))
    carry = lib.while_loop(lambda carry: (carry[0] < 7) & (carry[3][1] < 100), body, start)
    none = lib.while_loop(lambda carry: carry[0] < 0, body, start)
    return carry, none[:2]


def loop_that_donates(lib: Any) -> Any:
    step = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)

    def body(carry: Any) -> Any:
        count, x = carry
        return count + 1, step(x) + _there_and_back(count * jnp.ones_like(x))

    return lib.while_loop(lambda carry: carry[0] < 5, body, (0, _square()))


def one_mesh(lib: Any) -> Any:
    x = _square()
    y = lib.cond(_positive(x), _double, jax.jit(lambda x: x - 1), x)
    return y, lib.while_loop(jax.jit(lambda x: x.sum() < 1e3), _double, jnp.abs(x))


def several_in_one(lib: Any) -> Any:
    """Use choices that depend on each other, and independent ones."""
    x = _square()
    y = lib.cond(_positive(x), _here, _there_and_back, x)
    z = lib.cond(_positive(-x), _here, _there_and_back, x)
    w = lib.switch(_positive(y + z).astype(jnp.int32), [_here, _there_and_back], y)
    return x + 1, y + 1, y + z, w, lib.cond(_positive(w), lambda: y, lambda: _there_and_back(z))


CHOICES = (
    cond_over_islands,
    cond_with_trees,
    switch_out_of_range,
    loop_over_islands,
    loop_that_donates,
    one_mesh,
    several_in_one,
)
