"""Tests of callbacks that write into buffers: results are those of stock JAX, on devices of one host and of two."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.buffer_callback import buffer_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemoteError, RemotePython


def like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def sums_and_products(_: Any, out: Any, arguments: Any) -> None:
    x, y = np.asarray(arguments["x"]), np.asarray(arguments["y"])
    np.asarray(out[0])[...] = x + y
    np.asarray(out[1])[...] = x * y


def results_of_transformations() -> dict[str, np.ndarray[Any, Any]]:
    x, y = jnp.arange(4, dtype=jnp.float32), jnp.arange(4, dtype=jnp.float32) + 1

    def both(x: jax.Array, y: jax.Array) -> Any:
        call = buffer_callback(sums_and_products, (like(x), like(y)), vmap_method="broadcast_all")
        return jnp.stack(call({"x": x, "y": y}))

    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    spread = jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"))
    sharding = NamedSharding(mesh, P("x"))
    results = {
        "eager": both(x, y),
        "jit": jax.jit(both)(x, y),
        "vmap": jax.jit(jax.vmap(both))(x, y).T,
        "scan": jax.lax.scan(lambda carry, xy: (carry, both(*xy)), 0, (x, y))[1].T,
        "shard_map": jax.jit(spread)(jax.device_put(x, sharding), jax.device_put(y, sharding)),
    }
    return {name: np.asarray(result) for name, result in results.items()}


def in_place() -> tuple[list[float], bool]:
    """Return a callable whose argument and result share memory."""
    shared: list[bool] = []

    def increase(_: Any, out: Any, x: Any) -> None:
        memory = np.asarray(out)
        shared.append(memory.ctypes.data == np.asarray(x).ctypes.data and not x.writeable)
        memory[1:] += 1

    x = jnp.arange(3, dtype=jnp.float32)
    result = jax.jit(buffer_callback(increase, like(x), input_output_aliases={0: 0}))(x)
    return [float(each) for each in result], all(shared)


def raises() -> None:
    def wrong(*_: Any) -> None:
        raise ValueError("nothing to write")

    buffer_callback(wrong, jax.ShapeDtypeStruct((), jnp.float32))().block_until_ready()


@pytest.mark.parametrize("hosts", ["atoll_python", "two_hosts_python"])
def test_what_is_written_is_the_result_under_all_transformations(hosts: str, request: Any) -> None:
    results = request.getfixturevalue(hosts).call(results_of_transformations)
    x = np.arange(4, dtype=np.float32)
    for name, result in results.items():
        np.testing.assert_array_equal(result, np.stack([2 * x + 1, x * (x + 1)]), err_msg=name)


def test_a_result_may_share_its_arguments_memory(atoll_python: RemotePython) -> None:
    assert atoll_python.call(in_place) == ([0.0, 2.0, 3.0], True)


def test_what_a_callable_raises_is_the_error_of_its_run(atoll_python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"(?s)Error when calling buffer callback: .*ValueError: nothing to write"):
        atoll_python.call(raises)
