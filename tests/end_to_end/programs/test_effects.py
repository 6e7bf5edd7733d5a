"""Tests of programs with effects: they have the same effects as their functions without a program.

Functions without `test_` in their names run in the child.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from tests.end_to_end.remote_python import RemoteError, RemotePython

seen: list[Any] = []


@jax.jit
def heard(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda total: seen.append(("heard", float(total))), x.sum())
    return x * 2


@jax.jit
def written(x: jax.Array) -> None:
    io_callback(lambda total: seen.append(("written", float(total))), None, x.sum())


@jax.jit
def in_order(x: jax.Array, number: jax.Array) -> jax.Array:
    io_callback(lambda number: seen.append(int(number)), None, number, ordered=True)
    return x + 1


@jax.jit
def increased(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def over_two_islands() -> tuple[list[float], list[Any]]:
    import atoll

    far = jax.devices()[4]

    @atoll.program
    def step(x: jax.Array) -> jax.Array:
        y = jax.device_put(heard(x), far)
        written(y)
        heard(y)  # its result is unused
        jax.debug.callback(lambda total: seen.append(("outside of jit", float(total))), y.sum())
        return increased(y)

    seen.clear()
    results = [float(step(jnp.full(2, number, jnp.float32)).sum()) for number in range(2)]
    jax.effects_barrier()
    return results, sorted(seen)


def without_arguments_and_results() -> list[Any]:
    import atoll

    @atoll.program
    def step() -> None:
        jax.debug.callback(lambda: seen.append("here"))

    seen.clear()
    step()
    step()
    jax.effects_barrier()
    return seen


def ordered_over_nodes() -> tuple[float, list[Any]]:
    import atoll

    devices = jax.devices()

    @atoll.program
    def step(x: jax.Array, first: jax.Array) -> jax.Array:
        for number in range(6):
            x = jax.device_put(in_order(x, first + number), devices[number % 3])
            first = jax.device_put(first, devices[number % 3])
        return x

    seen.clear()
    x = jnp.zeros(())
    for first in (0, 6, 12):
        x = step(jax.device_put(x, devices[0]), jax.device_put(jnp.int32(first), devices[0]))
    jax.effects_barrier()
    return float(x), seen


def raises() -> None:
    import atoll

    def wrong(x: Any) -> Any:
        raise ValueError("not this one")

    @jax.jit
    def failing(x: jax.Array) -> jax.Array:
        return jax.pure_callback(wrong, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    atoll.program(lambda x: failing(x) + 1)(jnp.ones(2)).block_until_ready()


def test_nodes_of_two_islands_call_back_whatever_becomes_of_their_results(python: RemotePython) -> None:
    results, calls = python.call(over_two_islands)
    assert results == [2.0, 6.0]
    assert calls == sorted(
        call
        for number in (0.0, 1.0)
        for call in (
            ("heard", 2 * number),
            ("heard", 4 * number),
            ("written", 4 * number),
            ("outside of jit", 4 * number),
        )
    )


def test_a_program_may_have_nothing_but_effects(python: RemotePython) -> None:
    assert python.call(without_arguments_and_results) == ["here", "here"]


def test_ordered_effects_keep_their_order_over_nodes_and_launches(python: RemotePython) -> None:
    result, calls = python.call(ordered_over_nodes)
    assert result == 18.0
    assert calls == list(range(18))


def test_what_a_callback_raises_is_the_error_of_the_program_that_calls_it(python: RemotePython) -> None:
    with pytest.raises(RemoteError, match="ValueError: not this one"):
        python.call(raises)
