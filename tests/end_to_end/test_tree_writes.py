"""Tests of `jax.device_put` of trees of small arrays: the arrays of stock JAX, with one request for all arrays.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemotePython

DTYPES = ("bool", "int8", "uint16", "int64", "float16", "float64", "complex64")


def tree() -> dict[str, Any]:
    """Return arrays of all kinds, some of which are not written together."""
    return {
        "many": [np.float32(i) for i in range(30)],
        "dtypes": [np.ones((2, 3), dtype) for dtype in DTYPES],
        "others": [np.ones((2, 3), dtype) for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.int4)],
        "empty": [np.zeros((0, 4), np.float32)] * 5,
        "large": [np.arange(100_000.0)] * 5,
        "views": [np.arange(24).reshape(4, 6)[:, ::2], np.arange(24).reshape(4, 6).T, np.broadcast_to(3, (2, 2))],
        "scalars": (1, 2.5, True, 3j),
        "arrays": [jnp.arange(3)] * 4,
    }


def described(made: Any) -> Any:
    """Return the values of arrays, and the properties that a script can see."""
    return jax.tree.map(
        lambda x: (np.asarray(x), x.weak_type, x.committed, sorted(device.id for device in x.devices())), made
    )


def on_one_device() -> Any:
    return described(jax.device_put(tree(), jax.devices()[1]))


def on_the_default_device() -> Any:
    return described(jax.device_put(tree()))


def on_several_devices() -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    values = [np.arange(4.0) + i for i in range(20)]
    places = [jax.devices()[i % 2] if i % 4 else NamedSharding(mesh, P("x" if i % 8 else None)) for i in range(20)]
    return described(jax.device_put(values, places))


def as_arguments() -> Any:
    return described(jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))([np.float32(i) for i in range(20)]))


def guarded(guard: str) -> str:
    with jax.transfer_guard_host_to_device(guard):
        try:
            return str(len(jax.device_put([np.float32(i) for i in range(10)], jax.devices()[0])))
        except jax.errors.JaxRuntimeError as error:
            return str(error)


def requests() -> list[int]:
    """Return how many arrays each request makes."""
    from atoll.client.jax_patches import tree_writes

    asked = []
    make = tree_writes._make

    def counted(device: Any, arrays: Any) -> Any:
        asked.append(len(arrays))
        return make(device, arrays)

    tree_writes._make = counted
    try:
        jax.device_put([np.float32(i) for i in range(40)], jax.devices()[0])
    finally:
        tree_writes._make = make
    return asked


def with_a_server_that_refuses() -> list[float]:
    from atoll.client.jax_patches import tree_writes

    submit = tree_writes.submit

    def refusing(client: Any, payload: bytes) -> Any:
        return submit(client, payload[:-1] + b"?")

    tree_writes.submit = refusing
    try:
        return [float(x) for x in jax.device_put([np.float32(i) for i in range(6)], jax.devices()[0])]
    finally:
        tree_writes.submit = submit


EACH: list[Callable[[], Any]] = [
    on_one_device,
    on_the_default_device,
    on_several_devices,
    as_arguments,
]


@pytest.mark.parametrize("write", EACH, ids=lambda write: write.__name__)
def test_the_arrays_are_those_of_stock_jax(same_as_stock: Callable[..., None], write: Callable[[], Any]) -> None:
    same_as_stock(write)


def test_one_request_makes_many_arrays(atoll_python: RemotePython) -> None:
    assert atoll_python.call(requests) == [40]


def test_jax_makes_the_arrays_that_the_server_refuses(atoll_python: RemotePython) -> None:
    assert atoll_python.call(with_a_server_that_refuses) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("guard", ["allow", "log", "disallow"])
def test_guards_that_allow_explicit_transfers_allow_it(atoll_python: RemotePython, guard: str) -> None:
    assert atoll_python.call(guarded, guard) == "10"


def test_a_guard_that_forbids_explicit_transfers_forbids_it(atoll_python: RemotePython) -> None:
    assert "Disallowed host-to-device transfer" in atoll_python.call(guarded, "disallow_explicit")
