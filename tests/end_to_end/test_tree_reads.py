"""Tests of `jax.device_get` of trees of small arrays: the values of stock JAX, with one request for all arrays.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.protocol.questions import MAX_SHARDS
from tests.end_to_end.remote_python import RemotePython
from tests.end_to_end.same import assert_same

DTYPES = ("bool", "int8", "uint16", "bfloat16", "float8_e4m3fn", "float32", "complex64", "int4")


_add_zero = jax.jit(lambda x: x + 0)


def computed(value: Any) -> jax.Array:
    """Return an array whose contents are not in this process."""
    return _add_zero(value)


def tree() -> dict[str, Any]:
    """Return arrays of all kinds, some of which are not read together."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    many = [computed(jnp.float32(i)) for i in range(40)]
    return {
        "many": many,
        "again": many[3],
        "dtypes": [
            computed(np.ones((2, 3), jnp.dtype(each))) for each in ("bfloat16", "int8", "bool", "complex64", "int4")
        ],
        "empty": computed(jnp.zeros((0, 4))),
        "large": computed(jnp.arange(100_000.0)),
        "replicated": [jax.device_put(jnp.arange(6.0) + i, NamedSharding(mesh, P())) for i in range(3)],
        "sharded": [jax.device_put(jnp.arange(6.0) + i, NamedSharding(mesh, P("x"))) for i in range(3)],
        "elsewhere": [jax.device_put(computed(jnp.float32(i)), jax.devices()[1]) for i in range(3)],
        "host": (np.arange(3), 5, None, "text"),
    }


@functools.cache
def _divide(sharding: NamedSharding) -> Any:
    return jax.jit(lambda tree: jax.tree.map(lambda x: x + jnp.zeros((), x.dtype), tree), out_shardings=sharding)


def sharded(value: Any, *axes: Any, memory: str | None = None) -> Any:
    """Return an array on four devices whose dimensions are divided along these axes, or a list of such arrays."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    sharding = NamedSharding(mesh, P(*axes), memory_kind=memory)
    if memory is not None:
        return jax.device_put(value, sharding)
    return _divide(sharding)(value)


def sharded_tree() -> dict[str, Any]:
    """Return arrays that are divided over devices in all ways."""
    numbers = np.arange(48).reshape(4, 12)
    divisions: tuple[tuple[Any, ...], ...] = (("x",), (None, "y"), ("x", "y"), ("y", "x"), (("y", "x"),), ())
    moved = sharded(numbers * 2, "x", memory="pinned_host")
    layout = Format(Layout((1, 0)), sharded(numbers, "x", "y").sharding)
    keys = jax.random.wrap_key_data(np.arange(16, dtype=np.uint32).reshape(8, 2))
    return {
        "divisions": [sharded(numbers + i, *axes) for i, axes in enumerate(divisions)],
        "dtypes": sharded([numbers.astype(jnp.dtype(dtype)) for dtype in DTYPES], "y", "x"),
        "empty": [sharded(np.zeros((0, 4)), *axes) for axes in (("x",), (None, "y"), ("x", "y"))],
        "large": sharded(jnp.arange(100_000.0), "x"),
        "in host memory": [moved, moved],
        "layout": [jax.device_put(jnp.asarray(numbers + i), layout) for i in range(2)],
        "keys": [jax.random.key_data(jax.device_put(keys, sharded(jnp.arange(8), "x").sharding))],
        "whole": [computed(jnp.float32(i)) for i in range(3)],
    }


def sharded_values() -> Any:
    found = jax.device_get(sharded_tree())
    assert all(not each.flags.writeable for each in found["divisions"])
    return jax.tree.map(np.ascontiguousarray, found)


def sharded_requests() -> int:
    return _requests([sharded(jnp.arange(12.0) + i, *axes) for i in range(20) for axes in (("x",), (("y", "x"),))])


def many_sharded_requests() -> tuple[int, bool]:
    """Return the number of requests for more shards than one request reads, and whether the values are right."""
    make, launches = jax.jit(lambda x: [x + i for i in range(64)]), 5 * MAX_SHARDS // 16 // 64
    arrays = [each for i in range(launches) for each in make(sharded(np.arange(4.0) + 1000 * i, ("x", "y")))]
    count = _requests(arrays)
    wanted = [np.arange(4.0) + 1000 * i + j for i in range(launches) for j in range(64)]
    return count, all((np.asarray(each) == want).all() for each, want in zip(arrays, wanted, strict=True))


def values() -> Any:
    found = jax.device_get(tree())
    assert all(not each.flags.writeable for each in found["many"])
    return found


def requests() -> int:
    """Return the number of requests by `device_get` for 40 arrays."""
    return _requests([computed(jnp.float32(i)) for i in range(40)])


def _requests(arrays: list[jax.Array]) -> int:
    from atoll.client.jax_patches import tree_reads

    asked = []
    ask = tree_reads.ask
    tree_reads.ask = lambda client, question: asked.append(question) or ask(client, question)  # type: ignore[assignment]
    try:
        jax.device_get(arrays)
    finally:
        tree_reads.ask = ask
    return len(asked)


def after_an_interrupt() -> list[float]:
    """Return values that are read after a read was interrupted between its two requests."""
    from atoll.client.jax_patches import tree_reads

    ask = tree_reads.ask

    def interrupted(client: Any, question: Any) -> bytes:
        tree_reads.ask = ask
        raise KeyboardInterrupt

    tree_reads.ask = interrupted
    with pytest.raises(KeyboardInterrupt):
        jax.device_get([computed(jnp.float32(1)), computed(jnp.float32(2))])
    return [float(each) for each in jax.device_get([computed(jnp.float32(3)), computed(jnp.float32(4))])]


def with_a_failed_array() -> str:
    def fail(x: Any) -> Any:
        raise ValueError("no such value")

    good = computed(jnp.float32(1))
    try:
        failed = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.float32), x))(jnp.float32(0))
        jax.device_get([good, failed])
    except jax.errors.JaxRuntimeError as error:
        assert float(good) == 1
        return "no such value" if "no such value" in str(error) else str(error)
    return "no error"


def with_a_failed_sharded_array(axes: tuple[Any, ...]) -> str:
    """Return the error of a read of arrays of which the shards of one have failed, while another is intact."""

    def fail(x: Any) -> Any:
        raise ValueError("no such value")

    good = sharded(jnp.arange(4.0), *axes)
    whole = jax.ShapeDtypeStruct((4,), np.float32)
    failing = jax.jit(lambda x: jax.pure_callback(fail, whole, x), out_shardings=good.sharding)
    try:
        jax.device_get([good, failing(jnp.arange(4.0))])
    except jax.errors.JaxRuntimeError as error:
        assert np.asarray(good).tolist() == [0, 1, 2, 3]
        return "no such value" if "no such value" in str(error) else str(error)
    return "no error"


def donated() -> list[Any]:
    """Return what is read before arrays are donated, and the error after."""
    arrays = [sharded(jnp.arange(4.0) + i, "x") for i in range(3)]
    double = jax.jit(lambda xs: [x * 2 for x in xs], donate_argnums=0)
    before = jax.device_get(arrays)
    after = double(arrays[:1])
    arrays = [sharded(jnp.arange(4.0) + i, "x") for i in range(3)]
    after += double(arrays)
    with pytest.raises(RuntimeError, match="deleted"):
        jax.device_get(arrays)
    return [*before, *jax.device_get(after)]


def partial_sums() -> list[Any]:
    """Return shards of arrays without parts, after an attempt to read the whole arrays."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        left = jax.device_put(np.arange(16.0, dtype=np.float32).reshape(4, 4), NamedSharding(mesh, P("y", "x")))
        right = jax.device_put(np.arange(8.0, dtype=np.float32).reshape(4, 2), NamedSharding(mesh, P("x", None)))
        arrays = [jnp.dot(left, right, out_sharding=NamedSharding(mesh, P("y", unreduced={"x"}))) for _ in range(3)]
    with suppress(Exception):
        jax.device_get(arrays)
    return [np.asarray(shard.data) for each in arrays for shard in each.addressable_shards]


def guarded(guard: str) -> str:
    arrays = [computed(jnp.float32(i)) for i in range(3)]
    with jax.transfer_guard_device_to_host(guard):
        try:
            return str([float(each) for each in jax.device_get(arrays)])
        except jax.errors.JaxRuntimeError as error:
            return str(error)


def deleted_sharded() -> str:
    arrays = [sharded(jnp.arange(4.0) + i, "y") for i in range(3)]
    arrays[1].delete()
    with pytest.raises(RuntimeError, match="deleted") as caught:
        jax.device_get(arrays)
    return type(caught.value).__name__


def deleted() -> str:
    arrays = [computed(jnp.float32(i)) for i in range(3)]
    arrays[1].delete()
    with pytest.raises(RuntimeError, match="deleted") as caught:
        jax.device_get(arrays)
    return type(caught.value).__name__


def from_a_callback() -> list[float]:
    """Read arrays that depend on this process's Python while they are read."""
    double = jax.jit(lambda x: jax.pure_callback(lambda y: y * 2, jax.ShapeDtypeStruct((), np.float32), x))
    return [float(each) for each in jax.device_get([double(jnp.float32(i)) for i in range(5)])]


def test_the_values_are_those_of_stock_jax(atoll_python: RemotePython) -> None:
    assert_same(atoll_python.call(values), values())


def test_one_request_reads_many_arrays(atoll_python: RemotePython) -> None:
    assert atoll_python.call(requests) == 1


@pytest.mark.parametrize("run", [with_a_failed_array, deleted, from_a_callback], ids=lambda run: run.__name__)
def test_errors_and_callbacks_are_those_of_stock_jax(atoll_python: RemotePython, run: Any) -> None:
    assert atoll_python.call(run) == run()


def test_an_interrupted_read_leaves_nothing_behind(atoll_python: RemotePython) -> None:
    assert atoll_python.call(after_an_interrupt) == [3, 4]


@pytest.mark.parametrize("guard", ["allow", "disallow", "log_explicit"])
def test_guards_that_allow_explicit_transfers_allow_it(atoll_python: RemotePython, guard: str) -> None:
    assert atoll_python.call(guarded, guard) == "[0.0, 1.0, 2.0]"


def test_a_guard_that_forbids_explicit_transfers_forbids_it(atoll_python: RemotePython) -> None:
    assert "Disallowed device-to-host transfer" in atoll_python.call(guarded, "disallow_explicit")


@pytest.mark.parametrize("python", ["atoll_python", "two_hosts_python"])
def test_the_values_of_sharded_arrays_are_those_of_stock_jax(request: pytest.FixtureRequest, python: str) -> None:
    assert_same(request.getfixturevalue(python).call(sharded_values), sharded_values())


@pytest.mark.parametrize("python", ["atoll_python", "two_hosts_python"])
def test_one_request_reads_many_sharded_arrays(request: pytest.FixtureRequest, python: str) -> None:
    child = request.getfixturevalue(python)
    assert child.call(sharded_requests) == 1
    assert child.call(many_sharded_requests) == (3, True)


@pytest.mark.parametrize("python", ["atoll_python", "two_hosts_python"])
@pytest.mark.parametrize("run", [deleted_sharded, donated, partial_sums], ids=lambda run: run.__name__)
def test_errors_of_sharded_arrays_are_those_of_stock_jax(request: pytest.FixtureRequest, python: str, run: Any) -> None:
    assert_same(request.getfixturevalue(python).call(run), run())


@pytest.mark.parametrize("python", ["atoll_python", "two_hosts_python"])
@pytest.mark.parametrize("axes", [(), ("x",)], ids=["replicated", "sharded"])
def test_a_failed_array_on_several_devices_has_its_own_error(
    request: pytest.FixtureRequest, python: str, axes: tuple[Any, ...]
) -> None:
    """Stock JAX ends the process instead."""
    assert request.getfixturevalue(python).call(with_a_failed_sharded_array, axes) == "no such value"
