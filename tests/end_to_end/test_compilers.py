"""Tests of compilations on a cluster with tenants: a tenant's compilation cannot end the cluster's processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import psutil
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from tests.devices.compilers import hostile
from tests.end_to_end import test_callbacks_end_to_end as callbacks
from tests.end_to_end import test_compile_time_callbacks as compile_time
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.forked_process import children

SECONDS = 120.0


def token_of(name: str) -> str:
    return f"the token of {name}"


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    """Start a cluster of one island with two hosts."""
    tenants = tuple(TenantSettings(name, token_hash(token_of(name))) for name in ("ana", "ben", "eve"))
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


# ---- functions that clients run

_kept: list[jax.Array] = []


def keep(value: float) -> None:
    """Keep an array over all devices of the cluster."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    _kept.append(jax.device_put(np.full(8, value, np.float32), sharding))


def kept_sum() -> float:
    """Compute with the kept array, with a program that was never compiled before."""
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


def compile_at_once(numbers: range, operations: int) -> None:
    """Compile this many large modules, all at the same time."""
    with ThreadPoolExecutor(len(numbers)) as threads:
        for outcome in [threads.submit(compile_module, hostile.large(each, operations)) for each in numbers]:
            outcome.result()


def add_half(value: float) -> float:
    return float(jax.jit(lambda x: x + value)(np.float32(2)))


# ---- tests


def worker_processes(cluster: StandingCluster) -> list[str]:
    return sorted(cluster.processes())


def compilers(cluster: StandingCluster) -> list[psutil.Process]:
    """Return the compiler processes of all hosts."""
    servers = [child for worker in cluster.processes().values() for child in children(worker.pid)]
    return [process for server in servers for process in server.children()]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_crash_of_the_compiler_is_an_error_of_that_compilation_alone(
    cluster: StandingCluster, user: Callable[[str], RemotePython], ana: RemotePython, ben: RemotePython
) -> None:
    ben.call(keep, 3.0)
    before = worker_processes(cluster)
    eve = user("eve")
    for text, end in (
        (hostile.RECURSION.format(0), "rec .*ended by SIGSEGV"),
        (hostile.TOP_K.format(3), "top .*ended by SIGABRT"),
        (hostile.RECURSION.format(1), "rec .*ended by SIGSEGV"),
        (hostile.RECURSION.format(2), "tenant eve cannot compile functions for another"),
    ):
        with pytest.raises(RemoteError, match=end):
            eve.call(compile_module, text)
    assert ben.call(kept_sum) == 24
    assert ana.call(add_half, 0.5) == 2.5
    assert worker_processes(cluster) == before


@pytest.mark.skipif(not hostile.DIVIDES_BY_ZERO, reason="this XLA compiles the module")
def test_values_that_do_not_fit_are_exhausted_memory_each_time(ana: RemotePython) -> None:
    for _ in range(4):  # more than the crashes after which a tenant cannot compile for a while
        with pytest.raises(RemoteError, match=r"RESOURCE_EXHAUSTED: Out of memory allocating 4398046511104 bytes"):
            ana.call(compile_module, hostile.HUGE_VALUE)
    assert ana.call(add_half, 3.5) == 5.5


def test_what_would_block_its_device_is_refused(ana: RemotePython) -> None:
    for text, name in ((hostile.INFEED, "stablehlo.infeed"), (hostile.SEND, "stablehlo.send")):
        with pytest.raises(RemoteError, match=f"UNIMPLEMENTED: {name}"):
            ana.call(compile_module, text)
    assert ana.call(add_half, 1.5) == 3.5


@pytest.mark.thorough
def test_others_compile_beside_the_long_compilations_of_a_tenant_which_end_with_its_session(
    cluster: StandingCluster, user: Callable[[str], RemotePython], ben: RemotePython
) -> None:
    assert ben.call(add_half, 2.5) == 4.5
    busy = user("ana")
    assert busy.call(add_half, 2.5) == 4.5
    before = {process.pid for process in compilers(cluster)}
    busy.begin(compile_at_once, range(4), 20_000)
    until(lambda: any(process.pid not in before for process in compilers(cluster)))
    for value in range(3, 6):
        assert ben.call(add_half, float(value)) == value + 2
    during = {process.pid for process in compilers(cluster)}
    busy.process.kill()
    until(lambda: len(during - {process.pid for process in compilers(cluster)}) >= 2)
    with pytest.raises(AssertionError, match="the child ended"):
        busy.finish()  # its modules were not compiled before
    assert ben.call(add_half, 6.0) == 8.0


def test_callbacks_of_tenants_have_their_values(ana: RemotePython) -> None:
    callbacks.test_callbacks_have_their_values_under_all_transformations(ana)
    callbacks.test_an_exception_arrives_with_its_own_traceback_and_no_other(ana)
    callbacks.test_callables_are_forgotten_with_their_functions(ana)


@pytest.mark.parametrize("with_shardy", [True, False])
def test_a_tenant_says_what_each_device_computes(ana: RemotePython, with_shardy: bool) -> None:
    result, asked = ana.call(compile_time.partitioned, with_shardy)
    rows = np.repeat(np.arange(2, dtype=np.float32), 2)[:, None]
    np.testing.assert_array_equal(result, (2 * np.arange(32, dtype=np.float32).reshape(4, 8) + rows).T)
    assert set(asked) == ({"partition"} if with_shardy else {"partition", "infer", "propagate"})


def test_a_tenant_is_asked_while_its_programs_are_compiled(ana: RemotePython) -> None:
    shown = ana.call(compile_time.inspected)
    assert [(name, spec) for name, spec, _ in shown] == compile_time.EXPECTED
    compile_time.test_what_a_rule_raises_is_the_error_of_the_compilation(ana, "infer", False)
    compile_time.test_what_is_raised_over_a_sharding_is_the_error_of_the_compilation(ana)
    compile_time.test_a_function_is_called_while_it_is_compiled_and_while_it_runs(ana)
    compile_time.test_a_callback_of_a_compilation_uses_the_cluster(ana)
