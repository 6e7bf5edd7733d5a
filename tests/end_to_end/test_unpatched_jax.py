"""Tests that programs fail on a cluster without the patches of JAX: each patch is still necessary, for its stated
reason.

If a test fails here, jaxlib may have lifted the limitation. The patch can then be deleted.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import colocated_python, serialize_executable
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import xla
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.client.jax_patches import PATCHES
from atoll.client.jax_patches.patch import Patch
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 60.0


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    """Start a cluster of one island with two hosts."""
    return start_cluster(islands="1x2x2")


@pytest.fixture(scope="module")
def unpatched(cluster: StandingCluster, start_python: StartPython) -> RemotePython:
    python = start_python(ATOLL_ADDRESS=cluster.address)
    python.call(leave_out_patches)
    return python


def leave_out_patches() -> None:
    from atoll.client import jax_patches

    jax_patches._installed = ()
    assert jax.devices()[0].client.runtime_type == "proxy/atoll"


def sharded(*spec: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P(*spec))


# ---- features that raise an error


def strided_arrays() -> None:
    jax.device_put(np.arange(4.0)[::-1]).block_until_ready()


def other_clients() -> None:
    on_cluster, here = (on(jax.devices(platform)[0]) for platform in ("atoll", "cpu"))
    jax.device_put(jax.device_put(np.arange(4.0), on_cluster), here).block_until_ready()


def on(device: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.array([device]), ("x",)), P("x"))


def dlpack() -> None:
    np.from_dlpack(jnp.arange(4.0))


def buffers() -> None:
    memoryview(jnp.arange(4.0))


def addresses() -> None:
    jnp.arange(4.0).unsafe_buffer_pointer()


def memory_statistics() -> None:
    jax.devices()[0].memory_stats()


def cost_analysis() -> None:
    jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).cost_analysis()


def modules_of_executables() -> None:
    jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile().runtime_executable().hlo_modules()


def serialized_executables() -> None:
    serialize_executable.serialize(jax.jit(lambda x: x + 1).lower(jnp.ones(4)).compile())


def host_callbacks() -> None:
    jax.jit(lambda x: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x))(jnp.ones(4))


def several_meshes() -> None:
    jax.jit(lambda x, y: x + y)(*(jax.device_put(jnp.ones(4), each) for each in jax.devices()[:2]))


def callbacks_at_compile_time() -> None:
    double = custom_partitioning(lambda x: x * 2)
    double.def_partition(
        partition=lambda mesh, operands, result: (mesh, lambda x: x * 2, operands[0].sharding, (operands[0].sharding,)),
        sharding_rule="i -> i",
    )
    jax.jit(double)(jax.device_put(np.arange(8.0), sharded("x")))


def transformations_for_all_platforms() -> None:
    xla.register_hlo_module_transformation(lambda module: None, name="unpatched")


def ffi_libraries() -> None:
    handler = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    jax.ffi.register_ffi_target("unpatched", jax.ffi.pycapsule(handler), platform="CUDA")
    jax.ffi.ffi_call("unpatched", jax.ShapeDtypeStruct((4,), np.float32))(jnp.ones(4, np.float32))


ERRORS: dict[str, Callable[[], None]] = {
    "strided arrays": strided_arrays,
    "other clients": other_clients,
    "dlpack": dlpack,
    "buffers": buffers,
    "addresses": addresses,
    "memory statistics": memory_statistics,
    "cost analysis": cost_analysis,
    "modules of executables": modules_of_executables,
    "serialized executables": serialized_executables,
    "FFI libraries": ffi_libraries,
    "host callbacks": host_callbacks,
    "callbacks at compile time": callbacks_at_compile_time,
    "transformations of modules for plug-ins": transformations_for_all_platforms,
    "jit over several meshes": several_meshes,
}


# ---- features that behave differently


def reads_an_array_to_reshard_it() -> bool:
    """JAX keeps the values of arrays that it has read."""
    x = jax.device_put(np.arange(1 << 20).reshape(1024, 1024), sharded("x"))
    jax.device_put(x, sharded(None, "x")).block_until_ready()
    return x._npy_value is not None


def calls_no_transformation() -> bool:
    called: list[bytes] = []
    xla.register_hlo_module_transformation(called.append, name="unpatched", platforms="cpu")
    try:
        jax.jit(lambda x: x * 11)(jnp.ones(4)).block_until_ready()
    finally:
        xla.clear_hlo_module_transformation("unpatched", platforms="cpu")
    return not called


def runs_colocated_python_elsewhere() -> bool:
    @colocated_python.colocated_python
    def directory(x: Any) -> Any:
        return x + (os.getcwd() == HERE)

    HERE = os.getcwd()
    return int(directory(jax.device_put(jnp.int32(0), jax.devices()[0]))) == 0


def takes_all_hosts_for_one() -> bool:
    return {device.task_id for device in jax.devices()} == {0} != {device.host for device in jax.devices()}


def has_no_hardware_numbers() -> bool:
    return {device.local_hardware_id for device in jax.devices()} == {None}


def finds_no_device_by_its_platform() -> bool:
    return not any(device in jax.devices(device.platform) for device in jax.devices())


def profiles_this_process_only() -> bool:
    with tempfile.TemporaryDirectory() as directory:
        jax.profiler.start_trace(directory)
        jnp.ones(4).block_until_ready()
        jax.profiler.stop_trace()
        return len(list(Path(directory).glob("plugins/profile/*/*.xplane.pb"))) == 1


SILENT: dict[str, Callable[[], bool]] = {
    "resharding": reads_an_array_to_reshard_it,
    "transformations of modules": calls_no_transformation,
    "transformations of modules for clients": calls_no_transformation,
    "settings of colocated Python": runs_colocated_python_elsewhere,
    "hosts of devices": takes_all_hosts_for_one,
    "hardware numbers": has_no_hardware_numbers,
    "devices by platform": finds_no_device_by_its_platform,
    "profiler": profiles_this_process_only,
    "exported profiles": profiles_this_process_only,
}

UNTESTED = {
    "transfer server": "it ends the process: tested below",
    "send and receive": "it needs a TPU",
    "newer operations": "a version of jaxlib may have no operation that is newer than twelve weeks",
    "many threads": "it is a matter of time",
    "meshes over islands": "it needs several islands: its probe shows the error",
    "reads of trees": "it is a matter of time",
    "direct reads": "it is a matter of time",
    "direct reads of several arrays": "it is a matter of time",
    "reads of elements": "it is a matter of time",
    "writes of trees": "it is a matter of time",
    "large writes": "it is a matter of time",
    "copies of arrays": "it is a matter of time",
    "small writes": "it is a matter of time",
    "resharding of trees": "it is a matter of time",
    "arguments from the host": "it is a matter of time",
    "numbers in eager operations": "it is a matter of time",
}


def start_transfer_server() -> None:
    from jax.experimental import transfer

    transfer.start_transfer_server(jax.devices()[0].client)


# ---- the tests


def test_each_patch_is_tested_or_has_a_reason() -> None:
    assert sorted([*ERRORS, *SILENT, *UNTESTED]) == sorted(patch.name for patch in PATCHES)


def error_of(name: str) -> str:
    try:
        ERRORS[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("patch", [each for each in PATCHES if each.name in ERRORS], ids=lambda patch: patch.name)
def test_without_the_patch_jax_raises_the_error_that_the_patch_names(patch: Patch, unpatched: RemotePython) -> None:
    if not patch.is_needed(jax.__version_info__):
        pytest.skip("this version of JAX does not need the patch, or Python does not allow it")
    assert patch.error
    assert patch.error in unpatched.call(error_of, patch.name, seconds=SECONDS)


def does(name: str) -> bool:
    return SILENT[name]()


@pytest.mark.parametrize("patch", [each for each in PATCHES if each.name in SILENT], ids=lambda patch: patch.name)
def test_without_the_patch_jax_does_something_else(patch: Patch, unpatched: RemotePython) -> None:
    if not patch.is_needed(jax.__version_info__):
        pytest.skip("this version of JAX does not need the patch, or Python does not allow it")
    assert unpatched.call(does, patch.name, seconds=SECONDS)


def test_without_the_patch_a_transfer_server_ends_the_process(
    cluster: StandingCluster, start_python: StartPython
) -> None:
    python = start_python(ATOLL_ADDRESS=cluster.address)
    python.call(leave_out_patches)
    with pytest.raises(AssertionError, match="the child ended with status -11"):
        python.call(start_transfer_server)
