"""Tests of programs on a GPU, compared with stock JAX on the same GPU. They are skipped on machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.devices.accelerators import devices
from tests.devices.compilers import hostile
from tests.end_to_end import test_overruns_end_to_end as overruns
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.end_to_end.test_compilers import compile_module

pytestmark = pytest.mark.skipif("cuda" not in devices(), reason="this machine has no GPU")
# Several processes share the GPU, so each allocates only the memory that it needs.
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
SECONDS = 60.0


@pytest.fixture(scope="module")
def on_atoll(start_python: StartPython) -> RemotePython:
    return start_python(islands="1x1x1", ATOLL_PLATFORM="cuda", **SHARED)


@pytest.fixture(scope="module")
def on_stock(start_python: StartPython) -> RemotePython:
    return start_python(JAX_PLATFORMS="cuda,cpu", **SHARED)


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    tenants = (
        TenantSettings("ana", token_hash("ana's token")),
        TenantSettings("eve", token_hash("eve's token"), run_seconds=2),
    )
    return start_cluster(SHARED, islands="1x1x1", platform="cuda", token="the cluster's", tenants=tenants)


# ---- functions that clients run


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def description() -> Any:
    (device,) = jax.devices("gpu")
    assert jax.devices("cuda") == jax.devices() == [device]
    names = ("platform", "device_kind", "compute_capability", "core_count", "device_vendor")
    memories = sorted(memory.kind for memory in device.addressable_memories())
    return [getattr(device, name) for name in names], memories, device.default_memory().kind, jax.default_backend()


def matrix_products() -> Any:
    a, b = numbers(256, 256), numbers(256, 256, seed=1)
    return [jax.jit(lambda a, b: a @ b)(a.astype(kind), b.astype(kind)) for kind in (np.float32, jnp.bfloat16)]


def gradient() -> Any:
    return jax.jit(jax.value_and_grad(lambda w: jnp.tanh(numbers(64, 128) @ w).sum()))(numbers(128, 128, seed=1))


def loops() -> Any:
    scanned = jax.jit(lambda x: jax.lax.scan(lambda c, y: (c * 0.9 + y, c), x[0], x))(numbers(100, 32))
    return scanned, jax.jit(lambda x: jax.lax.while_loop(lambda v: v < 1000, lambda v: v * 1.5, x))(np.float32(1))


def linear_algebra() -> Any:
    """Run linear algebra with cuSOLVER, and with LAPACK on the host."""
    a = numbers(32, 32)
    symmetric = a @ a.T + 32 * np.eye(32, dtype=np.float32)
    qr = jax.scipy.linalg.qr(a, mode="r", pivoting=True)
    eigenvalues = jnp.sort(jnp.abs(jnp.linalg.eigvals(a)))
    return jnp.linalg.cholesky(symmetric), jnp.linalg.svd(a, compute_uv=False), jnp.linalg.eigvalsh(a), qr, eigenvalues


def convolution() -> Any:
    return jax.lax.conv(numbers(4, 16, 32, 32), numbers(32, 16, 3, 3, seed=1), (1, 1), "SAME")


def attention() -> Any:
    q = numbers(2, 128, 4, 64).astype(jnp.bfloat16)
    return jax.jit(lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn"))(q)


def triton_kernel() -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] + y[...]

    shape = jax.ShapeDtypeStruct((1024,), np.float32)
    return pl.pallas_call(kernel, out_shape=shape, compiler_params=triton.CompilerParams(num_warps=4))(
        numbers(1024), numbers(1024, seed=1)
    )


def callbacks() -> Any:
    shape = jax.ShapeDtypeStruct((8,), np.float32)
    return jax.jit(lambda x: jax.pure_callback(lambda v: np.sin(np.asarray(v)), shape, x) * 2)(numbers(8))


def memories() -> Any:
    device = jax.devices()[0]
    there = jax.device_put(numbers(1000), SingleDeviceSharding(device, memory_kind="pinned_host"))
    back = jax.device_put(there, SingleDeviceSharding(device, memory_kind="device"))
    outside = jax.jit(lambda x: x * 2, out_shardings=there.sharding)(back)
    return there, back + 1, outside, [each.sharding.memory_kind for each in (there, back, outside)]


def donation() -> Any:
    x = jax.device_put(numbers(1000))
    return jax.jit(lambda x: x + 1, donate_argnums=0)(x), x.is_deleted()


OPERATIONS = (
    *(description, matrix_products, gradient, loops, linear_algebra, convolution, attention, triton_kernel, callbacks),
    *(memories, donation),
)


def values(name: str) -> Any:
    """Return the results of an operation as float64 arrays, for comparing compilations that may round differently."""
    return jax.tree.map(
        lambda x: np.asarray(x).astype(np.float64) if isinstance(x, jax.Array) else x, globals()[name]()
    )


def allocate(nbytes: int) -> int:
    return int(jnp.ones(nbytes, jnp.int8)[-1])


# ----


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_operations_give_the_values_of_stock_jax(
    operation: Callable[[], Any], on_atoll: RemotePython, on_stock: RemotePython
) -> None:
    got, expected = (python.call(values, operation.__name__) for python in (on_atoll, on_stock))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if isinstance(other, np.ndarray):
            np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3)
        else:
            assert one == other


def test_more_than_the_memory_is_an_error_and_the_session_goes_on(on_atoll: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"RESOURCE_EXHAUSTED: out of memory on device 0 .* needs 2\.0 TiB"):
        on_atoll.call(allocate, 1 << 41)
    assert on_atoll.call(allocate, 10) == 1


def test_a_module_that_crashes_the_compiler_costs_its_tenant_an_error(
    cluster: StandingCluster, start_python: StartPython
) -> None:
    ana, eve = (start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN=f"{name}'s token") for name in ("ana", "eve"))
    ana.call(overruns.keep)
    with pytest.raises(RemoteError, match="the compiler process ended by SIGSEGV"):
        eve.call(compile_module, hostile.RECURSION.format(0))
    assert ana.call(overruns.kept_sum) == 499500.0
    assert eve.call(allocate, 10) == 1
    ana.close()
    eve.close()


def test_a_loop_without_end_is_stopped_and_nobody_else_loses_anything(
    cluster: StandingCluster, start_python: StartPython
) -> None:
    ana, eve = (start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN=f"{name}'s token") for name in ("ana", "eve"))
    ana.call(overruns.keep)
    assert ana.call(overruns.kept_sum) == 499500.0
    stops = len(overruns.stopped(cluster.report()))
    eve.begin(overruns.loop_on, 1)
    while len(overruns.stopped(cluster.report())) == stops:
        assert ana.call(overruns.kept_sum, seconds=SECONDS) == 499500.0
    with pytest.raises(RemoteError, match=r"was stopped: it ran for . s while others waited.*run_seconds"):
        eve.finish(SECONDS)
    assert ana.call(overruns.kept_sum) == 499500.0
    assert [island["restarts"] for island in cluster.report()["islands"]] == [0]
    ana.close()
    eve.close()
