"""Tests of arrays that share memory on their devices: views of shards, and arrays assembled from parts.

A user may donate or delete one of them while the others exist. The others keep their contents, and no process crashes.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.end_to_end.remote_python import RemoteError, RemotePython

SIZE = 1024  # elements of a shard


def sharding(*devices: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array([jax.devices()[i] for i in devices]), ("x",)), PartitionSpec("x"))


def whole_with_views() -> tuple[jax.Array, list[jax.Array]]:
    """Return an array of ones on two devices, and views of its shards."""
    whole = jax.device_put(jnp.ones(2 * SIZE, jnp.float32), sharding(0, 1))
    return whole, [shard.data for shard in whole.addressable_shards]


def whole_with_parts() -> tuple[jax.Array, list[jax.Array]]:
    """Return an array of ones on two devices, and the parts that it was assembled from."""
    parts = [jax.device_put(jnp.ones(SIZE, jnp.float32), jax.devices()[i]) for i in (0, 1)]
    return jax.make_array_from_single_device_arrays((2 * SIZE,), sharding(0, 1), parts), parts


def replica_with_views() -> tuple[jax.Array, list[jax.Array]]:
    """Return an array of ones that is replicated on two devices, and views of both copies."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    whole = jax.device_put(jnp.ones(SIZE, jnp.float32), NamedSharding(mesh, PartitionSpec()))
    return whole, [shard.data for shard in whole.addressable_shards]


def consume(how: str, array: jax.Array) -> jax.Array | None:
    """Donate or delete the array. Return the array that replaces it, if any."""
    match how:
        case "donated to a move to other devices":
            return jax.device_put(array, sharding(2, 3), donate=True)
        case "donated to a move to devices in another order":
            return jax.device_put(array, sharding(1, 0), donate=True)
        case "donated to a function":
            return jax.jit(lambda x: x * 1, donate_argnums=0)(array)
        case "deleted":
            array.delete()
    return None


MADE = {each.__name__: each for each in (whole_with_views, whole_with_parts, replica_with_views)}
CONSUMED = (
    "donated to a move to other devices",
    "donated to a move to devices in another order",
    "donated to a function",
    "deleted",
)


def use_views_of_what_was(how: str, made: str) -> list[float]:
    """Return the means of the array that replaces a consumed one, of its views plus one, and of a view that is then
    donated.
    """
    whole, views = MADE[made]()
    result = consume(how, whole)
    del whole
    found = [] if result is None else [float(result.sum()) / result.size]
    found += [float((view + 1).sum()) / SIZE for view in views]
    found.append(float(jax.jit(lambda x: x + 3, donate_argnums=0)(views.pop()).sum()) / SIZE)
    found.append(float(np.asarray(views.pop())[0]))
    del views, result
    return found


def use_the_whole_after_a_view_was(how: str, made: str) -> list[float]:
    whole, views = MADE[made]()
    view = views.pop()
    if how.startswith("donated to a move"):
        jax.device_put(view, jax.devices()[3], donate=True).block_until_ready()
    else:
        consume(how, view)
    del view
    return [float(whole.sum()) / whole.size, float((whole + 1).sum()) / whole.size]


CASES = list(itertools.product(CONSUMED, MADE))
# When the user deletes an array, JAX also deletes its views.
TAKEN_ALONG = [("deleted", "whole_with_views"), ("deleted", "replica_with_views")]


@pytest.mark.parametrize(("how", "made"), [case for case in CASES if case not in TAKEN_ALONG])
def test_views_keep_their_contents_when_the_whole_is_consumed(atoll_python: RemotePython, how: str, made: str) -> None:
    ones = [1.0] if how != "deleted" else []
    assert atoll_python.call(use_views_of_what_was, how, made) == [*ones, 2.0, 2.0, 4.0, 1.0]


@pytest.mark.parametrize(("how", "made"), TAKEN_ALONG)
def test_views_of_a_deleted_array_are_deleted(atoll_python: RemotePython, how: str, made: str) -> None:
    with pytest.raises(RemoteError, match="deleted"):
        atoll_python.call(use_views_of_what_was, how, made)


@pytest.mark.parametrize(("how", "made"), CASES)
def test_the_whole_keeps_its_contents_when_a_view_is_consumed(atoll_python: RemotePython, how: str, made: str) -> None:
    assert atoll_python.call(use_the_whole_after_a_view_was, how, made) == [1.0, 2.0]
