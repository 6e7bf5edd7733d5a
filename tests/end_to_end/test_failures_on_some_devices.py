"""Tests of computations on several hosts that fail on some of their devices: later ones wait, and are correct."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.ffi_kernels import COMPILER, MISSING, build
from tests.end_to_end.remote_python import StartPython

pytestmark = pytest.mark.skipif(COMPILER is None, reason=MISSING)
SECONDS = 120.0
LATER = 20  # computations behind the failing one


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("kernels"))


# ---- functions called in the script


def register(path: str) -> None:
    jax.devices()
    jax.ffi.register_ffi_target("check", jax.ffi.pycapsule(ctypes.CDLL(path).Check))


def fail_and_continue(signs: list[int], are_connected: bool = True) -> tuple[str, list[float | str]]:
    """Run a sum that fails on the devices with a negative sign. Return its error, and the results of sums queued behind
    it.

    If a sum failed, its result is the error. Without `are_connected`, the failing sum is the devices' first collective.
    """
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, P("x"))

    def total(shard: Any) -> Any:
        return jax.lax.psum(shard, "x")

    def checked(shard: Any) -> Any:
        return total(jax.ffi.ffi_call("check", jax.ShapeDtypeStruct(shard.shape, shard.dtype))(shard))

    failing = jax.jit(jax.shard_map(checked, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    adding = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    good = jax.device_put(np.ones(4, np.float32), sharding)
    bad = jax.device_put(np.array(signs, np.float32), sharding)
    later = [jax.device_put(np.full(4, value, np.float32), sharding) for value in range(LATER)]
    if are_connected:
        assert np.asarray(failing(good)).tolist() == [4.0] * 4
        assert np.asarray(adding(good)).tolist() == [4.0] * 4
    failed = failing(bad)
    sums = [adding(each) for each in later]
    return str(value_or_error(failed)), [value_or_error(each) for each in sums]


def value_or_error(array: jax.Array) -> float | str:
    try:
        return float(np.asarray(array)[0])
    except jax.errors.JaxRuntimeError as error:
        return str(error)


# ---- tests


@pytest.mark.parametrize("signs", [[1, 1, 1, -1], pytest.param([-1, -1, 1, 1], marks=pytest.mark.thorough)])
def test_collectives_of_islands_behind_one_that_failed_do_not_meet_it(
    library: str, start_python: StartPython, signs: list[int]
) -> None:
    script = start_python("2x1x2")
    script.call(register, library)
    for each in (signs, [-1, -1, -1, -1]):
        error, sums = script.call(fail_and_continue, each, seconds=SECONDS)
        assert "the first element is negative" in error, error
        assert sums == [4.0 * value for value in range(LATER)]


@pytest.mark.thorough
def test_a_first_collective_ends_that_waits_for_the_addresses_of_devices_that_failed(
    library: str, start_python: StartPython
) -> None:
    script = start_python("2x1x2")
    script.call(register, library)
    error, sums = script.call(fail_and_continue, [1, 1, -1, -1], False, seconds=SECONDS)
    assert "the first element is negative" in error
    assert sums == [4.0 * value for value in range(LATER)]


def test_collectives_of_an_island_behind_one_that_failed_do_not_meet_it(
    library: str, start_python: StartPython
) -> None:
    script = start_python("1x2x2")
    script.call(register, library)
    error, sums = script.call(fail_and_continue, [-1, -1, -1, -1], seconds=SECONDS)
    assert "the first element is negative" in error
    assert sums == [4.0 * value for value in range(LATER)]
    # Devices that wait for the failed one cannot be freed, so that their island restarts.
    error, sums = script.call(fail_and_continue, [1, 1, 1, -1], seconds=SECONDS)
    assert "the first element is negative" in error
    assert all(isinstance(each, str) and "its island is restarted" in each for each in sums)
