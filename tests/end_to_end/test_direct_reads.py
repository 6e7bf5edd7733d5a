"""Tests of reads that bypass jaxlib's client: the values and errors of stock JAX.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.ifrt.early_reads import MIN_SECONDS_BEFORE_OTHERS
from tests.end_to_end.lost_controller import controller
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StartCluster

FROZEN_SECONDS = 60.0  # for a busy machine
DTYPES = ("bool", "int8", "uint16", "bfloat16", "float8_e4m3fn", "float32", "complex64", "int4")


_add_zero = jax.jit(lambda x: x + jnp.zeros((), x.dtype))


def computed(value: Any) -> jax.Array:
    """Return an array whose contents are not in this process."""
    return _add_zero(value)


def sharded(array: Any, spec: P) -> jax.Array:
    return jax.device_put(array, NamedSharding(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y")), spec))


def of_all_dtypes() -> list[np.ndarray]:
    numbers = np.arange(700_000).reshape(70, -1)
    return [np.asarray(computed(numbers.astype(jnp.dtype(dtype)))) for dtype in DTYPES]


def of_all_shapes() -> list[np.ndarray]:
    shapes = [(), (0,), (3, 0, 2), (1,), (70_001,), (3, 5, 70_001), (3_000_000,)]
    return [np.asarray(computed(np.full(shape, 3.0))) for shape in shapes]


def of_shards() -> list[Any]:
    specs = [P(), P("x"), P("x", "y"), P(None, ("y", "x")), P(("x", "y"))]
    whole = jnp.arange(1_600_000.0).reshape(400, 4000)
    arrays = [sharded(whole, spec) for spec in specs]
    return [*map(np.asarray, arrays), *(np.asarray(arrays[2].addressable_data(i)) for i in range(4))]


def of_small_arrays_that_are_ready() -> list[np.ndarray]:
    arrays = [computed(np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype))) for dtype in DTYPES]
    arrays += [computed(np.full(shape, 3.0)) for shape in ((), (1,), (5, 7), (4096,), (4097,))]
    arrays.append(jax.jit(lambda x: x.T)(np.arange(12.0).reshape(3, 4)))
    arrays += [sharded(jnp.asarray(np.arange(16.0).reshape(4, 4)), spec) for spec in (P(), P("x"), P("x", "y"))]
    return [np.asarray(each) for each in jax.block_until_ready(arrays)]


def of_a_transposed_result() -> np.ndarray:
    return np.asarray(jax.jit(lambda x: x.T)(np.arange(1_000_000.0).reshape(500, 2000)))


def of_keys() -> np.ndarray:
    return np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), 50_000)))


def started_before() -> list[np.ndarray]:
    arrays = [computed(jnp.full((300_000,), i)) for i in range(20)]
    for each in arrays:
        each.copy_to_host_async()
        each.copy_to_host_async()
    return [np.asarray(each) for each in arrays]


def read_twice() -> tuple[bool, bool]:
    x = computed(jnp.arange(300_000))
    first, second = np.asarray(x), np.asarray(x)
    return np.shares_memory(first, second), first.flags.writeable


def by_threads() -> list[float]:
    shared, found = computed(jnp.arange(300_000.0)), [0.0] * 8

    def read(i: int) -> None:
        own = computed(jnp.full((300_000,), float(i)))
        found[i] = float(np.asarray(own).sum() + np.asarray(shared).sum())

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def of_a_failed_array() -> str:
    def fail(x: Any) -> Any:
        raise ValueError("no such value")

    try:
        array = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((9,), np.float32), x))(jnp.float32(0))
        array.copy_to_host_async()
        np.asarray(array)
    except jax.errors.JaxRuntimeError as error:
        return "no such value" if "no such value" in str(error) else str(error)
    return "no error"


def of_a_deleted_array() -> str:
    x = computed(jnp.arange(300_000))
    x.copy_to_host_async()
    x.delete()
    with pytest.raises(RuntimeError, match="deleted") as caught:
        np.asarray(x)
    return type(caught.value).__name__


def of_a_donated_array() -> str:
    x = computed(jnp.arange(300_000.0))
    x.copy_to_host_async()
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with pytest.raises(RuntimeError, match="deleted") as caught:
        np.asarray(x)
    return type(caught.value).__name__


def with_guard(guard: str) -> str:
    x = computed(jnp.arange(3))
    with jax.transfer_guard_device_to_host(guard):
        try:
            return str(np.asarray(x))
        except jax.errors.JaxRuntimeError as error:
            return str(error)


def ready_arrays(count: int) -> list[jax.Array]:
    return jax.block_until_ready([computed(jnp.float32(i)) for i in range(count)])


_READY: list[jax.Array] = []


def prepare(are_awaited: bool) -> None:
    """Make arrays that are ready, after the first read, for which the host opens a socket to this process.

    Wait for them, or only for an array that is computed after them, and then until they are old enough for early reads.
    """
    assert [float(each) for each in ready_arrays(2)] == [0, 1]
    _READY[:] = ready_arrays(9) if are_awaited else [computed(jnp.float32(i)) for i in range(9)]
    ready_arrays(1)
    if not are_awaited:
        time.sleep(MIN_SECONDS_BEFORE_OTHERS)


def read_prepared() -> list[float]:
    return [float(each) for each in _READY]


def started() -> int:
    """Return how many of three reads bypass jaxlib's client."""
    from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL

    count, start = 0, CLIENT_CHANNEL.reads.start

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return start(*arguments)

    CLIENT_CHANNEL.reads.start = counted  # type: ignore[method-assign]
    try:
        float(computed(jnp.float32(1))), np.asarray(computed(jnp.arange(300_000))), bool(computed(jnp.float32(1)))
    finally:
        del CLIENT_CHANNEL.reads.start
    return count


EACH: list[Callable[[], Any]] = [
    of_all_dtypes,
    of_all_shapes,
    of_shards,
    of_small_arrays_that_are_ready,
    of_a_transposed_result,
    of_keys,
    started_before,
    read_twice,
    by_threads,
    of_a_failed_array,
    of_a_deleted_array,
    of_a_donated_array,
]


EACH_ON_HOSTS = [of_all_dtypes, of_shards, of_small_arrays_that_are_ready, of_a_failed_array]


@pytest.mark.parametrize("read", EACH, ids=lambda read: read.__name__)
def test_reads_are_those_of_stock_jax(same_as_stock: Callable[..., None], read: Callable[[], Any]) -> None:
    same_as_stock(read)


@pytest.mark.parametrize("read", EACH_ON_HOSTS, ids=lambda read: read.__name__)
def test_reads_from_several_hosts_are_those_of_stock_jax(two_hosts_python: RemotePython, read: Any) -> None:
    from tests.end_to_end.same import assert_same

    assert_same(two_hosts_python.call(read), read())


def test_reads_bypass_jaxlibs_client(atoll_python: RemotePython) -> None:
    assert atoll_python.call(started) == 3


@pytest.mark.parametrize("are_awaited", [True, False])
def test_small_arrays_that_are_ready_are_read_without_the_controller(
    start_cluster: StartCluster, start_python: StartPython, are_awaited: bool
) -> None:
    cluster = start_cluster(islands="1x1x1")
    child = start_python(ATOLL_ADDRESS=cluster.address)
    child.call(prepare, are_awaited)
    process = controller(cluster)
    process.suspend()
    try:
        assert child.call(read_prepared, seconds=FROZEN_SECONDS) == list(range(9))
    finally:
        process.resume()


@pytest.mark.parametrize("guard", ["allow", "log"])
def test_guards_that_allow_transfers_allow_reads(atoll_python: RemotePython, guard: str) -> None:
    assert atoll_python.call(with_guard, guard) == "[0 1 2]"


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
def test_guards_that_forbid_transfers_forbid_reads(atoll_python: RemotePython, guard: str) -> None:
    assert "Disallowed device-to-host transfer" in atoll_python.call(with_guard, guard)
