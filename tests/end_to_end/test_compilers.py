"""Compilation on a cluster with tenants: what one tenant compiles ends none of the cluster's processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.cluster.tenants import TenantSettings, token_hash
from tests.devices.compilers import hostile
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 120.0


def token_of(name: str) -> str:
    return f"the token of {name}"


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    """One island of two hosts."""
    tenants = tuple(TenantSettings(name, token_hash(token_of(name))) for name in ("ana", "ben"))
    return start_cluster(islands="1x2x2", token="the token of the cluster", tenants=tenants)


@pytest.fixture(scope="module")
def user(start_python: StartPython, cluster: StandingCluster) -> Callable[[str], RemotePython]:
    return lambda name: start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN=token_of(name))


@pytest.fixture(scope="module")
def ana(user: Callable[[str], RemotePython]) -> RemotePython:
    return user("ana")


@pytest.fixture(scope="module")
def ben(user: Callable[[str], RemotePython]) -> RemotePython:
    return user("ben")


# ---- what runs in clients

_kept: list[jax.Array] = []


def keep(value: float) -> None:
    """Keep an array over all devices of the cluster."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    _kept.append(jax.device_put(np.full(8, value, np.float32), sharding))


def kept_sum() -> float:
    """Compute with what was kept, by a program that was not compiled before."""
    offset = len(_kept) + time.monotonic()
    result = jax.jit(lambda x: (x - offset).sum() + offset * x.size)(_kept[-1])
    return round(float(result))


def compile_module(text: str) -> None:
    """Compile a module for the first device, as JAX would."""
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    device = jax.devices()[0]
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        loaded = device.client.compile_and_load(module, xla_client.DeviceList((device,)), xla_client.CompileOptions())
    loaded.local_devices()  # waits for the outcome


def compile_large(first: int, count: int, operations: int) -> None:
    for number in range(first, first + count):
        compile_module(hostile.large(number, operations))


def add_half(value: float) -> float:
    return float(jax.jit(lambda x: x + value)(np.float32(2)))


# ---- tests


def worker_processes(cluster: StandingCluster) -> list[str]:
    return sorted(cluster.processes())


def test_a_crash_of_the_compiler_is_an_error_of_that_compilation_alone(
    cluster: StandingCluster, ana: RemotePython, ben: RemotePython
) -> None:
    ben.call(keep, 3.0)
    before = worker_processes(cluster)
    for number in range(6):
        with pytest.raises(RemoteError, match=r"rec .*cannot be compiled: the compiler process ended by SIGSEGV"):
            ana.call(compile_module, hostile.RECURSION.format(number))
        with pytest.raises(RemoteError, match="cannot be compiled: the compiler process ended by SIG"):
            ana.call(compile_module, hostile.TOP_K.format(3 + number))
    assert ben.call(kept_sum) == 24
    assert ana.call(add_half, 0.5) == 2.5
    assert worker_processes(cluster) == before
