"""Tests of large arrays that the script writes: the values of stock JAX, without jaxlib's files.

Each function without `test_` in its name runs in a child on Atoll. `values` also runs here, on stock JAX.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemotePython

ROWS, COLUMNS = 1024, 1280


def table() -> Any:
    """Return the table of writes, after a direct channel to the host has opened."""
    from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL

    until = time.monotonic() + 60
    while not CLIENT_CHANNEL.sends_to(jax.devices()[0]):
        assert time.monotonic() < until, "the host opens no direct channel"
        time.sleep(0.01)
    return CLIENT_CHANNEL.writes


def contents() -> np.ndarray[Any, Any]:
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


def whole_arrays() -> list[Any]:
    x = contents()
    return [
        jax.device_put(x, jax.devices()[1]),
        jax.device_put(x),
        *(jax.device_put(x.astype(dtype)) for dtype in ("int8", "bfloat16", "bool", "complex64", "float64", "int64")),
        jax.device_put(x.T),
        jax.device_put(x[:, ::2]),
        jax.jit(lambda y: y + 1)(x),
        jax.jit(lambda y: y * 2, donate_argnums=0)(jax.device_put(x, may_alias=False)),
        jnp.asarray(x),
        jnp.array(x),
    ]


def divided_arrays() -> list[Any]:
    x = contents()
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    grid = Mesh(np.array(jax.devices()[3::-1]).reshape(2, 2).T, ("x", "y"))
    return [
        *(jax.device_put(x, NamedSharding(mesh, spec)) for spec in (P("x"), P(None, "x"), P())),
        *(jax.device_put(x[:, :40].T, NamedSharding(grid, spec)) for spec in (P("x", "y"), P("y"), P(None, "x"), P())),
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("x")), lambda index: x[index]),
    ]


def values() -> list[tuple[Any, ...]]:
    """Return the properties of each array: its type, its sharding and a checksum of its contents.

    Those on several devices are made several times, because the first ones of a type are not sent together.
    """
    found = []
    for each in whole_arrays() + [each for _ in range(4) for each in divided_arrays()]:
        content = np.asarray(each)
        spec = str(getattr(each.sharding, "spec", ""))
        found.append((each.dtype.name, each.weak_type, each.committed, spec, each.shape, zlib.crc32(content.tobytes())))
    return found


def values_of_direct_writes() -> list[tuple[Any, ...]]:
    table()
    return values()


def writes() -> list[int]:
    """Return the number of writes for one whole array, for two large shards, and for four smaller ones.

    The last number is the number of unfinished writes.
    """
    kept = table()
    began = []
    start = kept.start
    kept.start = lambda *write: began.append(write) or start(*write)
    x = np.zeros((ROWS, COLUMNS), np.float32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    try:
        jax.device_put(x).block_until_ready()
        whole = len(began)
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("x")), lambda index: x[index]).block_until_ready()
        divided = len(began) - whole
        for number in range(4):
            before = len(began)
            y = np.arange(100_000, dtype=np.int32) + number
            made = jax.device_put(y, NamedSharding(mesh, P("x")))
            if number == 3:  # copied before the function returns
                y[:] = -1
            assert (np.asarray(made) == np.arange(100_000) + number).all()
        together = len(began) - before
    finally:
        kept.start = start
    until = time.monotonic() + 60
    while len(kept) and time.monotonic() < until:
        time.sleep(0.01)
    return [whole, divided, together, len(kept)]


def guarded() -> str:
    table()
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        try:
            jax.device_put(np.zeros((ROWS, COLUMNS), np.float32))
        except jax.errors.JaxRuntimeError as error:
            return str(error)
    return "no error"


def test_the_values_and_types_are_those_of_stock_jax(atoll_python: RemotePython) -> None:
    assert atoll_python.call(values_of_direct_writes) == values()


def test_large_arrays_are_written_to_their_hosts_and_then_forgotten(atoll_python: RemotePython) -> None:
    assert atoll_python.call(writes) == [1, 2, 1, 0]


def test_a_guard_that_forbids_transfers_forbids_writes(atoll_python: RemotePython) -> None:
    assert "Disallowed host-to-device transfer" in atoll_python.call(guarded)
