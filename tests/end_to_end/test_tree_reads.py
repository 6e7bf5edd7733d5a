"""Tests of `jax.device_get` of trees of small arrays: the values of stock JAX, with one request for all arrays.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemotePython
from tests.end_to_end.same import assert_same


def computed(value: Any) -> jax.Array:
    """Return an array whose contents are not in this process."""
    return jax.jit(lambda x: x + 0)(value)


def tree() -> dict[str, Any]:
    """Return arrays of all kinds, some of which are not read together."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    many = [computed(jnp.float32(i)) for i in range(40)]
    return {
        "many": many,
        "again": many[3],
        "dtypes": [computed(jnp.ones((2, 3), dtype)) for dtype in ("bfloat16", "int8", "bool", "complex64", "int4")],
        "empty": computed(jnp.zeros((0, 4))),
        "large": computed(jnp.arange(100_000.0)),
        "replicated": [jax.device_put(jnp.arange(6.0) + i, NamedSharding(mesh, P())) for i in range(3)],
        "sharded": [jax.device_put(jnp.arange(6.0) + i, NamedSharding(mesh, P("x"))) for i in range(3)],
        "elsewhere": [jax.device_put(computed(jnp.float32(i)), jax.devices()[1]) for i in range(3)],
        "host": (np.arange(3), 5, None, "text"),
    }


def values() -> Any:
    found = jax.device_get(tree())
    assert all(not each.flags.writeable for each in found["many"])
    return found


def requests() -> int:
    """Return the number of requests by `device_get` for 40 arrays."""
    from atoll.client.jax_patches import tree_reads

    asked = []
    ask = tree_reads.ask
    tree_reads.ask = lambda client, question: asked.append(question) or ask(client, question)  # type: ignore[assignment]
    try:
        jax.device_get([computed(jnp.float32(i)) for i in range(40)])
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


def guarded(guard: str) -> str:
    arrays = [computed(jnp.float32(i)) for i in range(3)]
    with jax.transfer_guard_device_to_host(guard):
        try:
            return str([float(each) for each in jax.device_get(arrays)])
        except jax.errors.JaxRuntimeError as error:
            return str(error)


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
