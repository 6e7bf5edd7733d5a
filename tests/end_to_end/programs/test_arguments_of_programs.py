"""Tests of the arguments of programs on two islands: trees, closures, keys, other programs and donated arrays.

Functions without `test_` in their names run in the child.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.programs.functions import SQUARE, host, meshes, nested, on
from tests.end_to_end.remote_python import RemoteError, RemotePython
from tests.end_to_end.same import assert_same


def arguments() -> Any:
    import atoll

    first, second = meshes()

    @functools.partial(atoll.program, static_argnums=1, static_argnames="kind")
    def f(tree: Any, times: int, *rest: Any, scale: Any, kind: str = "a") -> Any:
        total = tree["x"]
        for _ in range(times):
            total = total + tree["y"] * scale
        return total, rest, kind == "a" and tree["x"], 7

    x = jax.device_put(np.arange(8.0), on(first, "x"))
    y = jax.device_put(np.arange(8.0), on(second))
    got = [
        f({"x": x, "y": y}, 2, 1, np.int8(3), scale=2.5),
        f({"x": x, "y": y}, 3, 1, np.int8(3), scale=2.5),
        f({"x": x, "y": 2.0}, 3, scale=np.float32(1), kind="b"),
    ]
    results = host(got)
    assert got[0][2] is x
    return results


def test_arguments_are_trees_of_anything_anywhere(python: RemotePython) -> None:
    two, three, other = python.call(arguments)
    x = np.arange(8.0)
    np.testing.assert_array_equal(two[0], x + x * 5)
    np.testing.assert_array_equal(three[0], x + x * 7.5)
    np.testing.assert_array_equal(other[0], x + 6)
    assert two[1] == (1, np.int8(3))
    assert other[2] is np.False_ or not other[2]
    assert two[3] == 7


def compiled_ahead() -> tuple[int, int, Any]:
    import atoll

    first, second = meshes()
    traced = []

    @atoll.program
    def f(x: Any, y: Any, *, z: Any) -> Any:
        traced.append(f)
        return jax.device_put(x * 2, on(second)) + y * z

    x = jax.device_put(np.arange(8.0), on(first, "x"))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for sharding in (x.sharding, None)]
    f.compile_ahead(*types, z=jax.ShapeDtypeStruct((), x.dtype))
    before = len(traced)
    return before, len(traced), host(f(x, np.arange(8.0), z=np.array(3.0)))


def test_a_program_that_was_compiled_ahead_is_not_traced_by_a_call(python: RemotePython) -> None:
    before, after, result = python.call(compiled_ahead)
    assert (before, after) == (1, 1)
    np.testing.assert_array_equal(result, np.arange(8.0) * 5)


def returned_argument() -> list[bool]:
    import atoll

    results = atoll.program(lambda x: (x, x + 1, jax.device_put(x, jax.devices()[0])))(np.arange(4.0))
    return [each.committed for each in results]


def test_a_host_value_that_is_returned_stays_uncommitted(python: RemotePython) -> None:
    assert python.call(returned_argument) == [False, False, True]


def closures() -> Any:
    import atoll

    weights = jax.device_put(SQUARE, jax.devices()[6])
    table = SQUARE.copy()

    @atoll.program
    def f(x: Any) -> Any:
        return x @ weights + table * 2.0, weights

    first = host(f(weights))
    table[:] = 0
    return first, host(f(weights)), host(weights @ weights + SQUARE * 2.0)


def test_what_a_function_closes_over_is_part_of_its_program(python: RemotePython) -> None:
    first, again, expected = python.call(closures)
    assert_same(first[0], expected)
    assert_same(again[0], expected)
    assert_same(first[1], SQUARE)


def test_programs_nest_and_are_transformed(python: RemotePython) -> None:
    outer, jitted, slope, mapped, expected = python.call(nested)
    assert_same(outer, expected)
    np.testing.assert_allclose(jitted, expected)
    np.testing.assert_allclose(slope, 2 * np.cos(2 * np.arange(4.0)) + 1)
    assert_same(mapped, expected)


def typed_keys() -> Any:
    import atoll

    _, second = meshes()
    split = atoll.program(lambda k: (jax.vmap(jax.random.split)(k), jax.vmap(lambda k: jax.random.normal(k, (3,)))(k)))
    many = jax.device_put(jax.random.split(jax.random.key(3), 4), on(second, "x"))
    keys, numbers = split(many)
    return [host((jax.random.key_data(k), n)) for k, n in ((keys, numbers), split.__wrapped__(many))]


def test_keys_are_arguments_and_results(python: RemotePython) -> None:
    got, expected = python.call(typed_keys)
    assert_same(got, expected)


def explicit_meshes() -> Any:
    import atoll

    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(explicit, explicit), devices=jax.devices()[4:])
    x = jax.device_put(SQUARE, NamedSharding(mesh, P("x", "y")))
    program = atoll.program(lambda x: (jnp.sin(x) * 2, jax.jit(lambda a: a.T + 1)(x), x.sum(0)))
    with jax.set_mesh(mesh):
        return host(program(x)), host(program.__wrapped__(x))


def test_shardings_may_be_part_of_the_types(python: RemotePython) -> None:
    got, expected = python.call(explicit_meshes)
    assert_same(got, expected)


def threads() -> list[str]:
    import threading

    import atoll

    first, _ = meshes()
    wide, narrow = jax.device_put(SQUARE, on(first, "x")), jnp.ones(3)
    program = atoll.program(lambda a, b: (a * 2, b + 1))  # the arguments have different numbers of shards
    errors: list[str] = []

    def work(number: int) -> None:
        try:
            for i in range(50):
                _, result = program(wide, narrow * (number + i))
                assert np.asarray(result)[0] == number + i + 1
        except Exception as error:
            errors.append(repr(error))

    workers = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return errors


def test_threads_share_a_program(python: RemotePython) -> None:
    assert python.call(threads) == []


def deleted() -> None:
    import atoll

    x = jnp.ones(3)
    x.delete()
    atoll.program(lambda x: x + 1)(x)


def test_a_deleted_argument_is_an_error_as_in_jit(python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"RuntimeError: Array has been deleted with shape=float64\[3\]"):
        python.call(deleted)


def donated(kind: str) -> Any:
    import atoll

    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    plain = jax.jit(lambda x: x + 1)
    programs = {
        "inside": atoll.program(lambda x: step(x) * 2),
        "outside": atoll.program(lambda x: plain(x) * 2, donate_argnums=0),
        "put": atoll.program(lambda x: jax.device_put(x, jax.devices()[7], donate=True)),
        "neither": atoll.program(lambda x: plain(x) * 2),
        "constant": atoll.program(lambda x: step(np.arange(4.0)) * x),
        "returned": atoll.program(lambda x: (plain(x), x), donate_argnums=0),
    }
    results = []
    for _ in range(3):
        x = jax.device_put(np.arange(4.0), jax.devices()[4])
        y = programs[kind](x)
        results.append((host(y), x.is_deleted()))
    return results


@pytest.mark.parametrize(
    ("kind", "consumed"),
    [("inside", True), ("outside", True), ("put", True), ("neither", False), ("constant", False), ("returned", False)],
)
def test_donated_arguments_are_deleted_as_by_jit(python: RemotePython, kind: str, consumed: bool) -> None:
    results = python.call(donated, kind)
    assert [deleted for _, deleted in results] == [consumed] * 3
    for value, _ in results[1:]:
        assert_same(value, results[0][0])
