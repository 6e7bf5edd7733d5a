"""Functions for children that publish arrays with files, and read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll
from atoll.errors import StatusError


def publish(first: int, value: float) -> int:
    """Publish arrays of this value with different shardings on two devices."""
    mesh = Mesh(np.array(jax.devices()[first : first + 2]), "x")
    rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    tree = {
        "rows": jax.device_put(jnp.full((64, 8), value), rows),
        "whole": jax.device_put(jnp.full(5, value, jnp.bfloat16), whole),
        "one": jax.device_put(jnp.float32(value), jax.devices()[first]),
    }
    return atoll.publish("policy", tree, spill="disk", checksums=True)


def publish_large(count: int, megabytes: int) -> int:
    """Publish this many arrays of this many MiB each."""
    tree = [jax.device_put(jnp.full(megabytes << 18, index, jnp.float32), jax.devices()[0]) for index in range(count)]
    return atoll.publish("large", tree, spill="disk")


def wait_until_stored(version: int) -> None:
    atoll.wait_until_stored("policy", version)


def read(version: int) -> set[float]:
    """Return the values of a version, read to the first two devices."""
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    tree = atoll.subscribe("policy", NamedSharding(mesh, PartitionSpec()), version=version, verify=True).tree
    return {float(value) for leaf in jax.tree.leaves(tree) for value in np.asarray(leaf, np.float32).ravel()}


def fill(megabytes: int) -> float:
    """Return the sum of an array of ones of this size, which occupies the first device during the call."""
    return float(jnp.sum(jax.device_put(jnp.ones(megabytes << 18, jnp.float32), jax.devices()[0])))


def read_large(newer_than: int) -> float:
    (array,) = atoll.subscribe("large", newer_than=newer_than).tree
    return float(array[-1])


def error_of_read(version: int) -> str:
    with pytest.raises(StatusError) as error:
        read(version)
    return str(error.value)


def publish_numbers(value: float) -> int:
    """Publish an array of this value, and wait until it is in files, without a computation."""
    array = jax.device_put(np.full(64, value, np.float32), jax.devices()[0])
    version = atoll.publish("numbers", [array], spill="disk")
    atoll.wait_until_stored("numbers", version)
    return version


def read_numbers(version: int) -> set[float]:
    (array,) = atoll.subscribe("numbers", version=version).tree
    return set(np.asarray(array).tolist())
