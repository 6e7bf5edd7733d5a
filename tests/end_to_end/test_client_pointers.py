"""Programs that hold pointers of the client's process are refused, and end no worker."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.end_to_end.remote_python import RemoteError, RemotePython

kept: list[jax.Array] = []


def sharded() -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    return jax.device_put(jnp.ones(8, jnp.float32), NamedSharding(mesh, PartitionSpec("x")))


def keep() -> None:
    kept.append(sharded())


def inspect() -> None:
    @jax.jit
    def inspected(x: jax.Array) -> jax.Array:
        jax.debug.inspect_array_sharding(x, callback=print)
        return x + 1

    inspected(sharded()).block_until_ready()


def use_what_was_kept() -> float:
    return float((kept.pop() + 1).sum())


def test_inspecting_a_sharding_inside_of_jit_is_refused_with_advice_and_other_arrays_live(
    atoll_python: RemotePython,
) -> None:
    atoll_python.call(keep)
    with pytest.raises(RemoteError, match=r"inspect_array_sharding.* \.sharding") as caught:
        atoll_python.call(inspect)
    assert "UNIMPLEMENTED" in caught.value.text
    assert atoll_python.call(use_what_was_kept) == 16.0
