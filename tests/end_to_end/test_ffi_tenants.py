"""Tests of FFI libraries on standing clusters: several scripts, tenants, crashes, restarts, and programs cached on
disk.
"""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from tests.end_to_end.ffi_kernels import COMPILER, MISSING, build
from tests.end_to_end.remote_python import RemoteError, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

pytestmark = pytest.mark.skipif(COMPILER is None, reason=MISSING)

SECONDS = 300.0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def other_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build kernels with the same names and other results."""
    return build(tmp_path_factory.mktemp("kernels"), "-DFACTOR=10")


@pytest.fixture(scope="module")
def tenants_cluster(start_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory) -> StandingCluster:
    cache = str(tmp_path_factory.mktemp("cache"))
    tenants = (
        TenantSettings("ana", token_hash("the token of ana"), native_code=True),
        TenantSettings("ben", token_hash("the token of ben"), native_code=True),
        TenantSettings("eve", token_hash("the token of eve")),
    )
    environment = {"ATOLL_CACHE_DIR": cache}
    return start_cluster(environment, islands="1x1x2", token="the token of the cluster", tenants=tenants)


# ---- functions that scripts run


def register(path: str) -> None:
    loaded = ctypes.CDLL(path)
    for name in ("Scale", "Crash"):
        jax.ffi.register_ffi_target(name.lower(), jax.ffi.pycapsule(getattr(loaded, name)))


def sum_of_ones(path: str) -> float:
    register(path)
    return again()


def again() -> float:
    results = jax.ShapeDtypeStruct((2, 3), np.float32), jax.ShapeDtypeStruct((2,), np.float32)
    call = jax.ffi.ffi_call("scale", results)
    _, sums = jax.jit(lambda x: call(x, scale=np.float32(1), sign="plus"))(np.ones((2, 3), np.float32))
    return float(np.asarray(sums)[0])


def call_of(name: str) -> Any:
    """Return the result of calling a target that the script has not registered."""
    return np.asarray(jax.jit(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((3,), np.float32)))(np.ones(3, np.float32)))


def plain() -> float:
    return float(np.asarray(jax.jit(lambda x: x.sum())(np.ones(3, np.float32))))


def forge(path: str) -> str:
    """Send a program whose targets are in a library that the script has not sent. Return the error."""
    from atoll.client.jax_patches import ffi_calls

    register(path)
    ffi_calls.SENT.send = lambda client, libraries: None
    try:
        again()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


# ---- the tests


def test_scripts_with_targets_of_one_name_call_their_own_libraries(
    cluster: StandingCluster, start_python: StartPython, library: str, other_library: str
) -> None:
    one, two = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2))
    assert one.call(sum_of_ones, library) == 3
    assert two.call(sum_of_ones, other_library) == 30
    assert one.call(again) == 3
    with pytest.raises(RemoteError, match="No FFI handler registered for unknown"):
        two.call(call_of, "unknown")
    one.close()
    two.close()


def test_a_library_returns_to_a_restarted_host(
    cluster: StandingCluster, start_python: StartPython, library: str
) -> None:
    python = start_python(ATOLL_ADDRESS=cluster.address)
    assert python.call(sum_of_ones, library) == 3
    restarts = cluster.report()["islands"][0]["restarts"]
    cluster.worker(0).send_signal(signal.SIGKILL)
    cluster.until(lambda report: report["islands"][0]["restarts"] > restarts, SECONDS)
    assert python.call(again) == 3
    python.close()


def test_a_kernel_that_crashes_its_worker_is_refused_from_then_on(
    cluster: StandingCluster, start_python: StartPython, library: str
) -> None:
    python = start_python(ATOLL_ADDRESS=cluster.address)
    assert python.call(sum_of_ones, library) == 3
    with pytest.raises(RemoteError, match=r"DATA_LOSS: host 0 of island 0 is gone .*SIGSEGV"):
        python.call(call_of, "crash")
    with pytest.raises(RemoteError, match=r"ABORTED: this computation ended the worker .*SIGSEGV"):
        python.call(call_of, "crash")
    assert python.call(again) == 3
    python.close()


def test_a_tenant_needs_the_permission_for_native_code(
    tenants_cluster: StandingCluster, start_python: StartPython, library: str
) -> None:
    ana, ben, eve = (
        start_python(ATOLL_ADDRESS=tenants_cluster.address, ATOLL_TOKEN=f"the token of {name}")
        for name in ("ana", "ben", "eve")
    )
    assert ana.call(sum_of_ones, library) == 3
    with pytest.raises(RemoteError, match=r"PERMISSION_DENIED: the tenant eve may not .*`native_code = true`"):
        eve.call(sum_of_ones, library)
    assert "PERMISSION_DENIED" in eve.call(forge, library)
    assert "has not sent the FFI library" in ben.call(forge, library)
    assert eve.call(plain) == 3
    for python in (ana, ben, eve):
        python.close()


def test_a_compiled_program_on_disk_is_for_one_content_of_its_library(
    tenants_cluster: StandingCluster, start_python: StartPython, library: str, other_library: str
) -> None:
    """The program and its functions are unchanged, but they must be compiled again if the contents of the library
    differ.
    """

    def run(path: str) -> tuple[float, int]:
        before = tenants_cluster.report()["functions"]["cached"]
        python = start_python(ATOLL_ADDRESS=tenants_cluster.address, ATOLL_TOKEN="the token of ben")
        result = python.call(sum_of_ones, path)
        python.close()
        return result, tenants_cluster.report()["functions"]["cached"] - before

    restarts = tenants_cluster.report()["islands"][0]["restarts"]
    assert run(library) == (3, 0)
    tenants_cluster.worker(0).send_signal(signal.SIGKILL)
    tenants_cluster.until(lambda report: report["islands"][0]["restarts"] > restarts, SECONDS)
    assert run(library) == (3, 1)
    assert run(other_library) == (30, 0)


def test_a_library_that_crashes_when_it_is_loaded_is_refused_from_then_on(
    cluster: StandingCluster, start_python: StartPython, tmp_path: Path
) -> None:
    path = build(tmp_path, "-DCRASH_WHEN_LOADED")
    python = start_python(ATOLL_ADDRESS=cluster.address, FFI_KERNELS_OF_SCRIPT="1")
    errors = []
    for _ in range(2):
        with pytest.raises(RemoteError) as raised:
            python.call(sum_of_ones, path)
        errors.append(raised.value.text)
    assert "ABORTED: this computation ended the worker" in errors[-1], errors
    assert python.call(plain) == 3
    python.close()
