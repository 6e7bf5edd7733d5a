"""Tests of loops over the elements of an array: the values and errors of stock JAX, with few requests.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.client.jax_patches.element_reads import SINGLE_READS
from tests.end_to_end.remote_python import RemotePython
from tests.end_to_end.same import assert_same

_add_zero = jax.jit(lambda x: x + jnp.zeros((), x.dtype))


def computed(value: Any) -> jax.Array:
    """Return an array whose contents are not in this process."""
    return _add_zero(value)


def replicated(value: Any) -> jax.Array:
    """Return an array that four devices have as a whole."""
    return _add_one()(value)


@functools.cache
def _add_one() -> Any:
    return jax.jit(lambda x: x + 1, out_shardings=_whole())


def _whole() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), P())


def values() -> list[Any]:
    """Return the values of elements of arrays of all kinds, which are read one after the other.

    JAX compiles a function with a result for each element, so most arrays have just enough elements.
    """
    dtypes = ("bool", "bfloat16", "complex64", "int4")
    found: list[Any] = [
        [np.asarray(each) for each in computed(np.arange(9).astype(jnp.dtype(each)))] for each in dtypes
    ]
    found += [[np.asarray(each) for each in computed(np.zeros((9, *shape)))] for shape in ((3, 2), (0,), (9000,))]
    found += [[float(each) for each in reversed(computed(np.arange(200.0)))]]
    keys = jax.random.wrap_key_data(np.arange(24, dtype=np.uint32).reshape(12, 2))
    found += [[jax.random.key_data(each).tolist() for each in keys]]
    return found


def values_on_several_devices() -> list[Any]:
    divided = NamedSharding(_whole().mesh, P("x"))
    found: list[Any] = [[int(each) for each in replicated(np.arange(40))]]
    return [*found, [float(each) for each in jax.device_put(jnp.arange(12.0), divided)]]


def from_several_threads() -> list[list[float]]:
    arrays = [computed(jnp.arange(300.0) + i) for i in range(4)]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda array: [float(each) for each in array], arrays * 3))


def elements_from_several_threads() -> list[float]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(float, computed(jnp.arange(300.0))))


def after_deletions() -> list[Any]:
    """Return the values of elements, of which one is deleted and one is donated before the others are read."""
    elements = list(computed(jnp.arange(40.0)))
    elements[5].delete()
    donated = jax.jit(lambda x: x * 2, donate_argnums=0)(elements[6])
    return [_read(each) for each in elements] + [float(donated)]


def deleted_later() -> list[Any]:
    """Return the values of elements, of which one is deleted after another one's read may have read it."""
    elements = list(computed(jnp.arange(40.0)))
    found = [_read(each) for each in elements[:10]]
    elements[20].delete()
    return found + [_read(each) for each in elements[10:]]


def of_a_failed_computation() -> list[Any]:
    return [_read(each) for each in _failed(jnp.arange(12.0))]


def with_a_failed_element() -> tuple[list[Any], int]:
    """Return what reads of elements return, of which one has failed, and the number of elements read together."""
    from atoll.client.jax_patches.element_reads import group

    elements = [replicated(jnp.float32(i)) for i in range(20)]
    elements[15] = _failed(jnp.float32(0))
    group(elements)
    found = [_read(each) for each in elements[: SINGLE_READS + 1]]
    together = sum(each._npy_value is not None for each in elements) - len(found)
    return found + [_read(each) for each in elements[SINGLE_READS + 1 :]], together


def _failed(value: Any) -> jax.Array:
    """Return an array on four devices. The computation has failed, but not in the call, as one on a single device."""

    def fail(x: Any) -> Any:
        raise ValueError("no such value")

    failing = jax.jit(
        lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x), out_shardings=_whole()
    )
    return failing(value)


def _read(array: jax.Array) -> Any:
    """Return the number in an array, or what distinguishes the error."""
    try:
        return float(array)
    except RuntimeError as error:  # JaxRuntimeError is a RuntimeError
        text = next((text for text in ("no such value", "has been deleted") if text in str(error)), str(error))
        return type(error).__name__, text


def guarded(guard: str) -> str:
    array = computed(jnp.arange(20.0))
    with jax.transfer_guard_device_to_host(guard):
        try:
            return str([float(each) for each in array])
        except jax.errors.JaxRuntimeError as error:
            return str(error)


def requests(count: int, read: int) -> tuple[int, int]:
    """Read elements of an array. Return the number of reads of one element, and that of reads of several."""
    from atoll.client.jax_patches import direct_reads, tree_reads

    single: list[Any] = []
    together: list[Any] = []
    request, ask = direct_reads.request_contents, tree_reads.ask

    def request_contents(array: Any) -> Any:
        if hasattr(array, "_atoll_elements"):  # JAX 0.10 also reads the number of parts
            single.append(array)
        return request(array)

    def ask_proxy(client: Any, question: Any) -> bytes:
        together.append(question)
        return ask(client, question)

    array = computed(jnp.arange(float(count)))
    direct_reads.request_contents, tree_reads.ask = request_contents, ask_proxy
    try:
        found = [float(each) for each, _ in zip(array, range(read), strict=False)]
    finally:
        direct_reads.request_contents, tree_reads.ask = request, ask
    assert found == list(range(read))
    return len(single), len(together)


def test_the_values_are_those_of_stock_jax(atoll_python: RemotePython) -> None:
    assert_same(atoll_python.call(values), values())


@pytest.mark.parametrize("python", ["atoll_python", "two_hosts_python"])
def test_the_values_on_several_devices_are_those_of_stock_jax(request: pytest.FixtureRequest, python: str) -> None:
    read = values_on_several_devices
    assert_same(request.getfixturevalue(python).call(read), read())


@pytest.mark.parametrize("count", [1, 2, SINGLE_READS])
def test_the_first_elements_are_read_one_by_one(atoll_python: RemotePython, count: int) -> None:
    assert atoll_python.call(requests, 256, count) == (count, 0)


def test_two_requests_read_the_others(atoll_python: RemotePython) -> None:
    assert atoll_python.call(requests, 100, 100) == (SINGLE_READS, 2)
    assert atoll_python.call(requests, 256, 256) == (3 * SINGLE_READS, 6)  # JAX divides an array into parts of 100


@pytest.mark.parametrize(
    "run",
    [
        from_several_threads,
        elements_from_several_threads,
        after_deletions,
        deleted_later,
    ],
    ids=lambda run: run.__name__,
)
def test_values_and_errors_are_those_of_stock_jax(atoll_python: RemotePython, run: Any) -> None:
    assert atoll_python.call(run) == run()


@pytest.mark.parametrize("python", ["atoll_python", "two_hosts_python"])
def test_each_failed_element_has_its_own_error(request: pytest.FixtureRequest, python: str) -> None:
    """Stock JAX ends the process instead."""
    child = request.getfixturevalue(python)
    error = ("JaxRuntimeError", "no such value")
    assert child.call(of_a_failed_computation) == [error] * 12
    expected = [error if i == 15 else float(i + 1) for i in range(20)]
    assert child.call(with_a_failed_element) == (expected, 0)


def test_a_guard_of_transfers_applies_to_each_element(atoll_python: RemotePython) -> None:
    assert atoll_python.call(guarded, "allow") == str(list(map(float, range(20))))
    assert "Disallowed device-to-host transfer" in atoll_python.call(guarded, "disallow")
