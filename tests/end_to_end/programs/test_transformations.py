"""Tests of derivatives, batches and `jax.jit` of programs on two islands: results, and numbers of launches.

Functions without `test_` in their names run in the child.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.end_to_end.programs.functions import RNG, host, meshes, on
from tests.end_to_end.remote_python import RemoteError, RemotePython

ARGUMENTS = tuple(RNG.standard_normal(shape).astype(np.float32) for shape in ((8, 8), (8, 8), (8, 8), (3, 8, 8)))


def loss(one: Any, two: Any, x: Any) -> Any:
    """Compute a loss with two jitted functions whose devices depend only on their arguments."""
    return _second(two, _first(one, x))


_first = jax.jit(lambda w, x: jnp.tanh(x @ w))
_second = jax.jit(lambda w, x: jnp.sum(jnp.sin(x @ w)))


def gradients(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    return jax.value_and_grad(f, argnums=(0, 1, 2))(one, two, x)


def forward(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    return jax.jvp(f, (one, two, x), (one, two, x))


def batch(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    return jax.vmap(f, in_axes=(None, None, 0))(one, two, xs)


def pullback(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    result, back = jax.vjp(f, one, two, x)
    return result, back(jnp.float32(2.0)), back(jnp.float32(3.0))


def linearized(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    result, change = jax.linearize(lambda one: f(one, two, x), one)
    return result, change(one)


def batch_of_gradients(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    return jax.vmap(jax.grad(f, argnums=(0, 1)), in_axes=(None, None, 0))(one, two, xs)


def gradient_of_a_batch(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    return jax.grad(lambda two: jnp.sum(jax.vmap(f, in_axes=(None, None, 0))(one, two, xs)))(two)


def second_derivatives(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    small = lambda v: f(one, two, x * v)  # noqa: E731
    return jax.hessian(small)(jnp.float32(0.5))


def jitted(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    return jax.jit(f)(one, two, x)


def jitted_gradients(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    return jax.jit(jax.value_and_grad(jax.jit(f), argnums=(0, 1)))(one, two, x)


def rematerialized(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    return jax.grad(jax.checkpoint(f), argnums=(0, 1))(one, two, x)


def in_a_program(f: Any, one: Any, two: Any, x: Any, xs: Any) -> Any:
    import atoll

    return atoll.program(jax.grad(f, argnums=(0, 1)))(one, two, x)


TRANSFORMED: dict[Callable[..., Any], int | None] = {
    gradients: 2,
    forward: 2,
    batch: 1,
    pullback: 3,
    linearized: 2,
    batch_of_gradients: 2,
    gradient_of_a_batch: None,  # and JAX's computations around it
    second_derivatives: None,
    jitted: 1,
    jitted_gradients: 1,
    rematerialized: None,
    in_a_program: 1,
}


def run(transformed: Callable[..., Any]) -> tuple[Any, Any, list[str]]:
    """Transform and run a program on two islands, and its function on one device.

    Return both results, and the names of the programs that the former has launched.
    """
    import atoll

    first, second = meshes()
    program = atoll.program(loss)
    one, two, x, xs = (
        jax.device_put(array, on(mesh, *spec))
        for array, mesh, spec in zip(
            ARGUMENTS, (first, second, first, first), (("x", "y"), ("x",), ("x",), (None, "y")), strict=True
        )
    )
    jax.block_until_ready(transformed(program, one, two, x, xs))  # with tracing and constants
    with atoll.trace() as spans:
        found = jax.block_until_ready(transformed(program, one, two, x, xs))
    alone = [jax.device_put(array, jax.devices()[0]) for array in ARGUMENTS]
    # JAX also makes programs for the 1.0 at which a gradient starts.
    launches = {(span.program, span.launched) for span in spans if not span.program.startswith(("device_put", "jit_"))}
    return host(found), host(transformed(loss, *alone)), sorted(name for name, _ in launches)


@pytest.mark.parametrize("transformed", TRANSFORMED, ids=lambda each: each.__name__)
def test_transformed_programs_are_programs(python: RemotePython, transformed: Callable[..., Any]) -> None:
    found, alone, launches = python.call(run, transformed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), found, alone)
    wanted = TRANSFORMED[transformed]
    assert wanted is None or len(launches) == wanted


def jit_that_says_where() -> tuple[str, str, Any, bool]:
    """Return the devices of the results and of donated arguments of a jit across both islands with explicit
    shardings.
    """
    import atoll

    first, second = meshes()
    a, b = jax.device_put(ARGUMENTS[0], on(first, "x")), jax.device_put(ARGUMENTS[1], on(second))
    f = jax.jit(atoll.program(lambda a, b: (a + 1, b * 2)), out_shardings=(on(second, "y"), None), donate_argnums=0)
    x, y = f(a, b)
    return str(x.sharding), str(y.sharding), host((x, y)), a.is_deleted()


def test_jit_over_islands_keeps_to_shardings_and_donation(python: RemotePython) -> None:
    first, second, (x, y), is_deleted = python.call(jit_that_says_where)
    assert "'y'" in first
    assert "PartitionSpec()" in second or "P()" in second
    np.testing.assert_array_equal(x, ARGUMENTS[0] + 1)
    np.testing.assert_array_equal(y, ARGUMENTS[1] * 2)
    assert is_deleted


def without_a_program() -> None:
    first, second = meshes()
    jax.jit(lambda a, b: (a, b))(jax.device_put(ARGUMENTS[0], on(first)), jax.device_put(ARGUMENTS[0], on(second)))


def with_the_local_cpu() -> None:
    import atoll

    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "atoll,cpu")
    try:
        local = jax.device_put(ARGUMENTS[0], jax.local_devices(backend="cpu")[0])
        jax.jit(atoll.program(lambda a, b: a + b))(jax.device_put(ARGUMENTS[0], jax.devices()[0]), local)
    finally:
        jax.config.update("jax_platforms", before)


def test_an_integer_result_has_no_derivative_and_is_no_obstacle(python: RemotePython) -> None:
    found, alone = python.call(_with_aux)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, alone)


def _with_aux() -> tuple[Any, Any]:
    import atoll

    first, second = meshes()

    def counted(w: Any, x: Any, steps: Any) -> Any:
        return _second(w, _first(x, x)), {"steps": steps + 1, "norm": jnp.max(x)}

    x, w = jax.device_put(ARGUMENTS[0], on(first, "x")), jax.device_put(ARGUMENTS[1], on(second))
    steps = jax.device_put(np.int32(7), on(first))
    found = jax.value_and_grad(atoll.program(counted), has_aux=True)(w, x, steps)
    alone = [jax.device_put(np.asarray(each), jax.devices()[0]) for each in (w, x, steps)]
    return host(found), host(jax.value_and_grad(counted, has_aux=True)(*alone))


@pytest.mark.parametrize("call", [without_a_program, with_the_local_cpu], ids=lambda each: each.__name__)
def test_jit_refuses_what_stock_refuses(python: RemotePython, call: Callable[[], None]) -> None:
    with pytest.raises(RemoteError, match="incompatible devices"):
        python.call(call)
