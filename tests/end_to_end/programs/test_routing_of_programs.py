"""Tests of `atoll.route` and `unroute` on two islands of two hosts: values, derivatives, transferred bytes, and
failures.

Functions without `test_` in their names run in the child.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.programs.routing_cases import by_themselves_and_in_a_program, check, meshes, parametrized


@pytest.fixture(scope="module")
def python(start_python: StartPython) -> RemotePython:
    return start_python("2x2x1")


@parametrized(3)
def test_rows_go_where_they_are_to_and_come_back(python: RemotePython, number: int) -> None:
    for found in python.call(by_themselves_and_in_a_program, number):
        check(number, found)


# ---- derivatives


def _given() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, 4, (8, 2))
    return rng.standard_normal((8, 3)), chosen, rng.standard_normal((8, 2)), list(rng.standard_normal((4, 3, 3)))


def _dense(rows: Any, chosen: Any, weights: Any, parameters: Any) -> Any:
    """Return the same result, computed from all rows by all experts."""
    made = jnp.stack([jnp.tanh(rows @ each) for each in parameters], 1)
    return ((made[np.arange(len(rows))[:, None], chosen] * weights[..., None]).sum(1) ** 2).sum()


def _sparse(rows: Any, chosen: Any, weights: Any, parameters: Any) -> Any:
    import atoll

    expert = jax.jit(lambda p, block: jnp.tanh(block @ p))
    blocks, routing = atoll.route(rows, chosen, to=meshes(), capacity=16)
    blocks = [expert(p, block) for p, block in zip(parameters, blocks, strict=True)]
    return (atoll.unroute(blocks, routing, weights) ** 2).sum()


def _placed() -> list[Any]:
    rows, chosen, weights, parameters = _given()
    lies = NamedSharding(meshes()[0], P("x"))
    there = [jax.device_put(p, NamedSharding(mesh, P())) for p, mesh in zip(parameters, meshes(), strict=True)]
    return [*(jax.device_put(each, lies) for each in (rows, chosen, weights)), there]


@functools.cache
def _gradient_of_a_program() -> Any:
    import atoll

    return jax.value_and_grad(atoll.program(_sparse), argnums=(0, 2, 3))


def _program_of_a_gradient() -> Any:
    import atoll

    return atoll.program(jax.value_and_grad(_sparse, argnums=(0, 2, 3)))


def gradients(made: Callable[[], Any]) -> Any:
    return jax.tree.map(np.asarray, made()(*_placed()))


@pytest.mark.parametrize(
    "made",
    [_gradient_of_a_program, pytest.param(_program_of_a_gradient, marks=pytest.mark.thorough)],
    ids=lambda made: made.__name__,
)
def test_derivatives_are_those_of_the_dense_computation(python: RemotePython, made: Callable[[], Any]) -> None:
    with jax.enable_x64(True):
        expected = jax.value_and_grad(_dense, argnums=(0, 2, 3))(*_given())
    found = python.call(gradients, made)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found, expected)


def programs_of_a_gradient() -> list[str]:
    import atoll

    given, gradient = _placed(), _gradient_of_a_program()
    jax.block_until_ready(gradient(*given))  # with tracing and constants
    with atoll.trace() as spans:
        jax.block_until_ready(gradient(*given))
    launches = {(span.program, span.launched) for span in spans}
    return sorted(name for name, _ in launches if not name.startswith(("device_put", "jit_")))


def test_a_gradient_of_a_program_with_a_route_is_two_launches(python: RemotePython) -> None:
    assert python.call(programs_of_a_gradient) == ["linearized _sparse", "transposed changes _sparse"]


# ---- transferred data


def bytes_of_a_route() -> list[tuple[str, int, int]]:
    """Route 8 rows of one island, three of them to the other island. Return the transfers as (kind, host, bytes)."""
    import atoll

    first, second = meshes()[:2]
    lies = NamedSharding(first, P("x"))
    rows = jax.device_put(np.ones((8, 32), np.float32), lies)
    chosen = jax.device_put(np.array([-1, 0, -1, -1, 0, -1, 0, -1]), lies)
    program = atoll.program(lambda rows, chosen: atoll.route(rows, chosen, to=[second], capacity=64))
    jax.block_until_ready(program(rows, chosen))
    with atoll.trace() as spans:
        jax.block_until_ready(program(rows, chosen))
    return sorted((s.kind, s.host, s.nbytes) for s in spans if s.nbytes)


def test_rows_travel_and_capacity_does_not(python: RemotePython) -> None:
    """Each host sends one message to each host of the other island: three numbers for its group, and that
    host's rows.
    """
    row, header = 32 * 4, 3 * 4
    assert python.call(bytes_of_a_route) == [
        ("receive rows", 2, 2 * header + 1 * row),
        ("receive rows", 3, 2 * header + 2 * row),
        ("send rows", 0, 2 * header + 1 * row),
        ("send rows", 1, 2 * header + 2 * row),
    ]


# ---- failures


def with_rows_that_fail() -> list[str]:
    import atoll

    first, second = meshes()[2:]
    x = jax.device_put(np.ones((4, 2)), NamedSharding(first, P()))

    def fail(x: Any) -> Any:
        raise ArithmeticError("no rows today")

    broken = atoll.program(jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((4, 2), x.dtype), x)))
    chosen = jax.device_put(np.array([0, 1, 0, 1]), NamedSharding(first, P()))
    blocks, routing = atoll.route(broken(x), chosen, to=[first, second], capacity=2)
    errors = []
    for each in (blocks[0], blocks[1], atoll.unroute(blocks, routing)):
        with pytest.raises(Exception, match="ArithmeticError") as failure:
            each.block_until_ready()
        errors.append(str(failure.value))
    blocks, routing = atoll.route(x, chosen, to=[first, second], capacity=2)
    np.testing.assert_array_equal(atoll.unroute(blocks, routing), x)
    return errors


def test_rows_that_fail_fail_what_comes_of_them_and_nothing_else(python: RemotePython) -> None:
    assert all("no rows today" in error for error in python.call(with_rows_that_fail))
