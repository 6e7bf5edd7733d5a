"""Tests that arrays export Python's buffer protocol like those of stock JAX.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemotePython

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="jaxlib's slots can be changed since PEP 688")

DTYPES = ("bool", "int8", "uint16", "int32", "float16", "float32", "complex64")
WITHOUT_FORMAT = ("bfloat16", "float8_e4m3fn", "float8_e4m3b11fnuz", "int4", "uint4")


_add_zero = jax.jit(lambda x: x + jnp.zeros((), x.dtype))


def computed(value: Any) -> jax.Array:
    """Return an array whose contents are not in this process."""
    return _add_zero(value)


def view_of(x: Any) -> tuple[bytes, str, int, tuple[int, ...], bool]:
    view = memoryview(x)
    return view.tobytes(), view.format.removeprefix("="), view.itemsize, view.shape or (), view.readonly


def of_all_dtypes() -> list[Any]:
    return [view_of(computed(jnp.arange(600).reshape(20, 30).astype(dtype))) for dtype in DTYPES]


def of_all_shapes() -> list[Any]:
    return [view_of(computed(jnp.ones(shape) * 3)) for shape in [(), (0,), (3, 0, 2), (1,), (3, 5), (3_000_000,)]]


def outlives_its_array() -> bytes:
    x = computed(jnp.arange(5.0))
    view = memoryview(x)
    x.delete()
    return view.tobytes()


def of_a_donated_array() -> tuple[bytes, list[float]]:
    x = computed(jnp.arange(5.0))
    view = memoryview(x)
    return view.tobytes(), jax.jit(lambda x: x + 1, donate_argnums=0)(x).tolist()


def by_consumers() -> tuple[str, list[float], float, bool]:
    x = computed(jnp.arange(5.0))
    without_copy = np.asarray(x, copy=False)
    return (
        hashlib.sha256(x).hexdigest(),
        np.frombuffer(x, np.float32).tolist(),
        without_copy[2],
        without_copy.flags.writeable,
    )


def refusals() -> list[str]:
    whole = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P())
    deleted = computed(jnp.arange(3))
    deleted.delete()
    arrays = [*(computed(jnp.zeros(3, dtype)) for dtype in WITHOUT_FORMAT), jax.device_put(jnp.ones(2), whole), deleted]
    found = []
    for array in arrays:
        with pytest.raises(BufferError) as caught:
            memoryview(array)
        found.append(str(caught.value))
    return found


def without_a_buffer() -> list[np.ndarray]:
    """NumPy converts arrays without a buffer differently."""
    split = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
    arrays = [
        *(computed(jnp.arange(3).astype(dtype)) for dtype in WITHOUT_FORMAT),
        jax.device_put(jnp.arange(2), split),
    ]
    return [np.asarray(array) for array in arrays]


def result_of(callback: Callable[[Any], Any]) -> jax.Array:
    """Return a shard of a callback's result. The call returns before the callback, since it uses two devices."""
    split = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
    call = jax.jit(
        lambda x: jax.pure_callback(callback, jax.ShapeDtypeStruct((2,), np.float32), x), out_shardings=split
    )
    return call(jax.device_put(np.ones(2, np.float32), split)).addressable_data(0)


EACH: list[Callable[[], Any]] = [
    of_all_dtypes,
    of_all_shapes,
    outlives_its_array,
    of_a_donated_array,
    by_consumers,
    refusals,
    without_a_buffer,
]


@pytest.mark.parametrize("export", EACH, ids=lambda export: export.__name__)
def test_exports_are_those_of_stock_jax(same_as_stock: Callable[..., None], export: Callable[[], Any]) -> None:
    same_as_stock(export)


# ---- NumPy ignores errors of exports


class _AlarmError(Exception):
    """Raised by the signal handler of the test."""


def interrupted() -> tuple[list[str], list[float]]:
    """Return the errors of reads during which a signal's handler raised one, and a later read."""

    def ring(*_: Any) -> None:
        raise _AlarmError("rung")

    def wait(x: Any) -> Any:
        time.sleep(2)
        return x

    before = signal.signal(signal.SIGALRM, ring)
    found = []
    try:
        for read in (np.asarray, memoryview, np.asarray):
            array = result_of(wait)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            try:
                read(array)
            except _AlarmError as error:
                found.append(str(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return found, np.asarray(array).tolist()


def test_errors_of_signal_handlers_end_reads_by_numpy(atoll_python: RemotePython) -> None:
    assert atoll_python.call(interrupted) == (["rung"] * 3, [1.0])


def converted_after_a_failed_export() -> list[float]:
    """An export that failed elsewhere must not cause an error of this read."""
    array = computed(jnp.ones(3))
    with jax.transfer_guard_device_to_host("disallow"), pytest.raises(jax.errors.JaxRuntimeError):
        memoryview(array)
    return array.__array__().tolist()


def test_a_failed_export_is_no_error_of_later_reads(atoll_python: RemotePython) -> None:
    assert atoll_python.call(converted_after_a_failed_export) == [1.0] * 3
