"""Tests that nothing returns a value of a run that fails after the value is ready, whichever way the value is used.

A callback that fails on one of several devices leaves zeros for the others, and its run fails when it has ended. A
kernel that fails on one device leaves the right values on the others, which may be read.

The suite uses the results of a few runs. `make thorough` uses those of more.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import atoll
from tests.end_to_end import ffi_kernels
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.thoroughness import TIMES, longer

FAILED = "failed"
ROUNDS = 2 if TIMES == 1 else 20
DEVICES = ((0, 1), (2, 0))  # of two hosts of an island, and of two islands

increment = jax.jit(lambda x: x + 1)
increment_in_place = jax.jit(lambda x: x + 1, donate_argnums=0)


@pytest.fixture(scope="module")
def python(start_python: StartPython) -> RemotePython:
    """Start a cluster of two islands, each with two hosts of one device."""
    return start_python(islands="2x2x1")


def read_after_a_wait(array: Any) -> Any:
    """Read a small array that the script has launched more than a millisecond ago: see `ifrt/early_reads.py`."""
    time.sleep(0.002)
    return np.asarray(array)


def read_when_ready(array: Any) -> Any:
    return np.asarray(array.block_until_ready())


def read_what_was_started(array: Any) -> Any:
    time.sleep(0.002)
    array.copy_to_host_async()
    return np.asarray(array)


def read_together(array: Any) -> Any:
    return jax.device_get([array, array])[0]


def read_a_shard(array: Any) -> Any:
    return np.asarray(array.addressable_shards[-1].data)


def read_what_depends_on_it(array: Any) -> Any:
    return np.asarray(increment(array))


def read_what_it_was_donated_to(array: Any) -> Any:
    return np.asarray(increment_in_place(array))


def read_a_copy(array: Any) -> Any:
    return np.asarray(jax.device_put(array, jax.devices()[-1]))


def read_a_resharded_copy(array: Any) -> Any:
    return np.asarray(jax.device_put(array, NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))))


def read_a_version(array: Any) -> Any:
    version = atoll.publish("late", [array, jax.device_put(1.0)])
    return np.asarray(atoll.subscribe("late", version=version).tree[0])


WAYS: tuple[Callable[[Any], Any], ...] = (
    *(read_after_a_wait, read_when_ready, read_what_was_started, read_together, read_a_shard),
    *(read_what_depends_on_it, read_a_copy, read_a_resharded_copy, read_a_version),
)


def outcomes(run: Callable[[], Any], why: str) -> dict[str, set[str]]:
    """Use the result of each run in all ways at the same time. Return the values and errors by way."""
    found: dict[str, set[str]] = {}

    def use(way: Callable[[Any], Any], array: Any) -> None:
        try:
            text = str(way(array))
        except (jax.errors.JaxRuntimeError, atoll.AtollError) as error:
            text = FAILED if why in str(error) else str(error)
        found.setdefault(way.__name__, set()).add(text)

    with ThreadPoolExecutor(len(WAYS)) as threads:
        for _ in range(ROUNDS):
            result = run()
            list(threads.map(use, WAYS, [result] * len(WAYS)))
            use(read_what_it_was_donated_to, result)
    return found


def on_devices(devices: tuple[int, ...], function: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a call of the function on each of these devices, the first of which has the argument 0 to 3."""
    mesh = Mesh(np.array(jax.devices())[list(devices)], ("x",))
    argument = np.arange(4 * len(devices), dtype=np.float32)
    placed = jax.device_put(argument, NamedSharding(mesh, P("x")))
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False))
    return lambda: run(placed)


def of_a_callback(devices: tuple[int, ...], collective: bool) -> dict[str, set[str]]:
    """Use results of a callback that fails on the first of these devices later than it ends on the others."""

    def refuse(x: Any) -> Any:
        if x[0] == 0:
            time.sleep(0.05)
            raise ValueError("not on the first device")
        return np.asarray(x) + 100

    def step(x: Any) -> Any:
        y = jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jax.lax.psum(y, "x") if collective else y

    return outcomes(on_devices(devices, step), "ValueError: not on the first device")


def of_a_kernel(path: str) -> list[dict[str, set[str]]]:
    """Use results of a kernel that fails on the first of two devices, of an island and of two islands."""
    jax.ffi.register_ffi_target("check", jax.ffi.pycapsule(ctypes.CDLL(path).Check))

    def step(x: Any) -> Any:
        return jax.ffi.ffi_call("check", jax.ShapeDtypeStruct(x.shape, x.dtype))(x - 1)

    return [outcomes(on_devices(devices, step), "the first element is negative") for devices in DEVICES]


@longer
@pytest.mark.parametrize("devices", DEVICES, ids=["of an island", "of two islands"])
@pytest.mark.parametrize("collective", [False, True])
def test_no_value_is_read_of_a_callback_that_fails_on_another_host(
    python: RemotePython, devices: tuple[int, ...], collective: bool
) -> None:
    found = python.call(of_a_callback, devices, collective)
    assert found == {way.__name__: {FAILED} for way in (*WAYS, read_what_it_was_donated_to)}


@longer
@pytest.mark.skipif(ffi_kernels.COMPILER is None, reason=ffi_kernels.MISSING)
def test_no_wrong_value_is_read_of_a_kernel_that_fails_on_another_host(python: RemotePython, tmp_path: Path) -> None:
    right = np.arange(3, 7, dtype=np.float32)
    allowed = {FAILED, str(right), str(right + 1)}
    for found in python.call(of_a_kernel, ffi_kernels.build(tmp_path)):
        assert all(texts <= allowed for texts in found.values()), found
