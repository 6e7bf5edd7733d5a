"""Tests that JAX's patches are active at a script's first use of devices, also for names that it looked up before.

Each use runs in a process that is forked from one which has imported JAX and has no client yet.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.dlpack import from_dlpack
from jax.experimental import transfer
from jax.experimental.transfer import start_transfer_server
from jax.extend import xla

from atoll.client.jax_patches import PATCHES
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StartCluster
from tests.end_to_end.test_module_transformations import cosines


@pytest.fixture(scope="module")
def python(start_cluster: StartCluster, start_python: StartPython) -> RemotePython:
    return start_python(ATOLL_ADDRESS=start_cluster(islands="1x1x2").address)


def in_a_fork(use: Callable[[], Any]) -> Any:
    """Run `use` in a child of this process, which has no client. Return its result, or how the child ended."""
    from jax._src import xla_bridge

    assert not xla_bridge.backends_are_initialized()
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        try:
            result = use()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writable, pickle.dumps(result))
        os._exit(0)
    os.close(writable)
    with open(readable, "rb") as answer:
        content = answer.read()
    _, status = os.waitpid(child, 0)
    return pickle.loads(content) if content else f"ended with {os.waitstatus_to_exitcode(status)}"


def a_transfer_server_by_its_module() -> Any:
    server: Any = transfer.start_transfer_server(jax.devices()[0].client)
    return server.address()


def a_transfer_server_by_its_name() -> Any:
    server: Any = start_transfer_server(jax.devices()[0].client, "[::]:0", transport_addresses=["127.0.0.1:0"])
    return server.address()


@pytest.mark.parametrize("use", [a_transfer_server_by_its_module, a_transfer_server_by_its_name])
def test_a_transfer_server_is_refused(use: Callable[[], Any], python: RemotePython) -> None:
    assert "BackendError: a transfer server sends from the devices of its own process" in python.call(in_a_fork, use)


def a_local_transfer_server() -> bool:
    jax.devices()
    return ":" in start_transfer_server(jax.local_devices(backend="cpu")[0].client, address="127.0.0.1:0").address()


def test_a_transfer_server_of_a_local_device_is_jaxs_own(python: RemotePython) -> None:
    assert python.call(in_a_fork, a_local_transfer_server) is True


def an_import_by_dlpack() -> tuple[list[float], bool]:
    """The name was looked up before there was a client. (A call that creates the client is JAX's own and
    stays local.)
    """
    device = jax.devices()[0]
    array = from_dlpack(np.arange(3.0, dtype=np.float32))
    return np.asarray(array).tolist(), array.device == device


def an_export_by_dlpack() -> list[float]:
    return np.from_dlpack(jnp.arange(3.0)).tolist()


def a_transformation_of_modules() -> float:
    xla.register_hlo_module_transformation(cosines, name="mine")
    return float(jax.jit(lambda x: jnp.sin(x))(jnp.float32(0)))


def a_profile() -> bool:
    with jax.profiler.trace("profile"):
        jnp.ones(3).block_until_ready()
    return len(list(Path("profile").rglob("*.xplane.pb"))) >= 1


def a_cost() -> bool:
    return jax.jit(lambda x: x @ x).lower(np.ones((4, 4), np.float32)).cost_analysis()["flops"] > 0


def memory_statistics() -> bool:
    return "bytes_in_use" in jax.devices()[0].memory_stats()


def a_callback() -> float:
    shape = jax.ShapeDtypeStruct((), np.float32)
    return float(jax.jit(lambda x: jax.pure_callback(lambda v: np.float32(v + 1), shape, x))(np.float32(1)))


def an_inspected_sharding() -> int:
    seen: list[Any] = []

    def inspects(x: Any) -> Any:
        jax.debug.inspect_array_sharding(x, callback=seen.append)
        return x * 2

    jax.jit(inspects)(np.ones(4, np.float32)).block_until_ready()
    return len(seen)


def strided_arrays() -> list[float]:
    return np.asarray(jax.device_put(np.arange(3.0, dtype=np.float32)[::-1])).tolist()


def a_copy_from_another_client() -> bool:
    local = jax.device_put(np.ones(3), jax.local_devices(backend="cpu")[0])
    return jax.device_put(local, jax.devices()[0]).device == jax.devices()[0]


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (an_import_by_dlpack, ([0.0, 1.0, 2.0], True)),
        (an_export_by_dlpack, [0.0, 1.0, 2.0]),
        (a_transformation_of_modules, 1.0),
        (a_profile, True),
        (a_cost, True),
        (memory_statistics, True),
        (a_callback, 2.0),
        (an_inspected_sharding, 1),
        (strided_arrays, [2.0, 1.0, 0.0]),
        (a_copy_from_another_client, True),
    ],
)
def test_a_first_use_is_as_later_ones(use: Callable[[], Any], expected: Any, python: RemotePython) -> None:
    assert python.call(in_a_fork, use) == expected


# ---- when and where the patches are installed


def a_callback_in_a_wrapped_compiler() -> tuple[list[float], int, list[str]]:
    """The script's wrapper is installed before the patches, and removed after them."""
    from jax._src import compiler

    original, seen = compiler.backend_compile_and_load, list[Any]()

    def counting(client: Any, program: Any, *others: Any) -> Any:
        seen.append(program)
        return original(client, program, *others)

    compiler.backend_compile_and_load = counting
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [a_callback()]
    compiler.backend_compile_and_load = original
    return [*results, a_callback()], len(seen), [str(each.message) for each in caught]


def test_patches_work_inside_of_a_scripts_own_wrapper_and_after_it(python: RemotePython) -> None:
    results, programs, warned = python.call(in_a_fork, a_callback_in_a_wrapped_compiler)
    assert results == [2.0, 2.0]
    assert programs > 0
    assert warned == []


def patched_when_the_first_backend_starts() -> list[tuple[str, bool]]:
    from jax._src import xla_bridge

    from atoll.client import jax_patches

    start, seen = xla_bridge._init_backend, list[tuple[str, bool]]()

    def starting(platform: str) -> Any:
        seen.append((platform, bool(jax_patches._installed)))
        return start(platform)

    xla_bridge._init_backend = starting
    jax.config.update("jax_platforms", "cpu,atoll")
    jax.devices()
    return seen


def test_patches_are_installed_before_any_backend_starts(python: RemotePython) -> None:
    assert python.call(in_a_fork, patched_when_the_first_backend_starts) == [("cpu", True), ("atoll", True)]


def warnings_of_a_later_jax() -> tuple[list[str], bool]:
    from atoll.client.jax_patches import patch

    patch.SUPPORTED_BEFORE = (0, 10, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.devices()
        jax.extend.backend.clear_backends()
        works = float(jnp.float32(2) * 3) == 6
    return [str(each.message) for each in caught if each.category is RuntimeWarning], works


def test_with_a_later_jax_scripts_work_and_one_warning_says_what_is_missing(python: RemotePython) -> None:
    (warned,), works = python.call(in_a_fork, warnings_of_a_later_jax)
    assert works
    assert "only tested with jax>=0.10.2,<0.10.2" in warned
    assert "- host callbacks: callbacks into Python: `jax.pure_callback`, `io_callback`" in warned
    assert warned.count("\n- ") == sum(patch.is_needed(jax.__version_info__) for patch in PATCHES)
