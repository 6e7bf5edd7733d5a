"""Tests of virtual devices and slices, as users' programs request them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import atoll
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster


@pytest.fixture(scope="module")
def mesh_cluster(start_cluster: StartCluster) -> StandingCluster:
    """Start two islands of one host, each with a 2x2 mesh of devices."""
    return start_cluster(islands="2x1x4", mesh="2x2", device_memory=1 << 26)


@pytest.fixture
def python(mesh_cluster: StandingCluster, start_python: StartPython) -> Any:
    mesh_cluster.until(lambda report: not report["sessions"], 10)
    child = start_python(ATOLL_ADDRESS=mesh_cluster.address)
    yield child
    child.close()


@functools.cache
def device_set() -> Any:
    return atoll.make_virtual_device_set()


def ids(devices: Any) -> list[int]:
    return [device.id for device in devices]


def figure_two() -> list[list[float]]:
    """Run the program of the paper's figure 2, without its tracer."""

    def get_devices(n: int) -> Any:
        return atoll.make_virtual_device_set().add_slice(devices=n).tpus

    a = jax.pmap(lambda x: x * 2.0, devices=get_devices(2))
    b = jax.pmap(lambda x: x + 1.0, devices=get_devices(2))
    c = jax.pmap(lambda x: x / 2.0, devices=get_devices(2))
    v = np.array([1.0, 2.0])
    x = a(v)
    y = b(np.asarray(x))
    z = a(np.asarray(c(np.asarray(x))))
    return [np.asarray(y).tolist(), np.asarray(z).tolist()]


@pytest.mark.thorough
def test_the_program_of_figure_two(python: RemotePython) -> None:
    assert python.call(figure_two) == [[3.0, 5.0], [2.0, 4.0]]


def mesh_program() -> tuple[Any, ...]:
    with device_set().add_slice(shape=(2, 2)) as s:
        mesh = s.mesh(("x", "y"))
        array = jax.device_put(np.arange(16.0).reshape(4, 4), NamedSharding(mesh, PartitionSpec("x", "y")))
        total = jax.jit(lambda a: (a @ a.T).sum())(array)
        with device_set().add_slice(devices=2, other_island_than=s) as t:
            moved = jax.device_put(array[:, :2], NamedSharding(t.mesh("x"), PartitionSpec("x")))
            doubled = jax.jit(lambda a: 2 * a)(moved)
            islands = (s.island, t.island, {d.slice_index for d in doubled.devices()})
            return s.shape, ids(s.devices), [d.coords for d in s.devices], float(total), islands, np.asarray(doubled)


def test_a_mesh_of_a_slice_computes_and_its_arrays_go_to_another_island(python: RemotePython) -> None:
    shape, devices, coords, total, (here, there, found), doubled = python.call(mesh_program)
    assert shape == (2, 2)
    assert devices == [0, 1, 2, 3]
    assert coords == [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]
    whole = np.arange(16.0).reshape(4, 4)
    assert total == (whole @ whole.T).sum()
    assert (here, there, found) == (0, 1, {1})
    assert np.array_equal(doubled, 2 * whole[:, :2])
    assert python.call(released) == []


def released() -> list[Any]:
    return list(device_set().slices)


def ask(**slice_request: Any) -> list[int]:
    return ids(device_set().add_slice(**slice_request).devices)


def ask_beside(**slice_request: Any) -> int:
    first = device_set().slices[-1]
    island: int = device_set().add_slice(same_island_as=first, **slice_request).island
    return island - first.island


def test_requests_that_cannot_be_met_say_what_is_free(python: RemotePython) -> None:
    assert python.call(functools.partial(ask, devices=3)) == [0, 1, 2]
    assert python.call(functools.partial(ask_beside, devices=1)) == 0
    for slice_request, text in [
        ({"shape": (4, 1)}, r"no sub-mesh 4x1.*in no slice: island 0: none; island 1: 4, 5, 6, 7"),
        ({"tpu_devices": 2, "kind": "tpu"}, "no tpu devices"),
        ({"devices": 2, "memory_per_device": "1GiB"}, "64.0 MiB"),
        ({"devices": 9}, r"RESOURCE_EXHAUSTED.*it has 4 devices.*Request a slice that one of the islands can have"),
    ]:
        with pytest.raises(RemoteError, match=text) as refused:
            python.call(functools.partial(ask, **slice_request))
        assert refused.value.kind == "JaxRuntimeError"
    assert python.call(functools.partial(ask, shape=(2, 2), memory_per_device="1MiB")) == [4, 5, 6, 7]


def send(payload: bytes) -> None:
    from jax.extend.ifrt_programs import ifrt_programs

    program = ifrt_programs.make_plugin_program(payload)
    jax.devices()[0].client.compile_ifrt_program(program, ifrt_programs.make_plugin_compile_options())


def test_a_hostile_request_is_refused_and_the_session_goes_on(python: RemotePython) -> None:
    for payload in (b"", b"\xc1", b"\x81\xa5count\xff", b"\x82\xa5count\x01\xa3new\x01"):
        with pytest.raises(RemoteError, match=r"INVALID_ARGUMENT.*invalid slice request"):
            python.call(send, b"atoll.slice\0" + payload)
    assert python.call(functools.partial(ask, devices=1)) == [0]


def run_it() -> None:
    from atoll.client import client_slices

    loaded = client_slices._live[device_set().add_slice(devices=1)]
    loaded.execute_sharded([])


def test_a_slice_cannot_be_run(python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"slice \d+ is not a program and cannot be run"):
        python.call(run_it)


def both_at_once() -> float:
    """Add and remove slices while arrays are made. No array may be sent to a device that no longer exists."""
    from concurrent.futures import ThreadPoolExecutor

    def slices() -> None:
        for _ in range(20):
            with device_set().add_slice(devices=2):
                pass

    def arrays() -> float:
        return float(sum(jax.device_put(jnp.float32(i), jax.devices()[i % 8]) for i in range(1)))

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(slices)
        total = 0.0
        while not running.done():
            total = sum(float(jax.device_put(np.float64(i), jax.devices()[i % 8])) for i in range(16))
        running.result()
    return total


def test_slices_and_arrays_at_the_same_time(python: RemotePython) -> None:
    assert python.call(both_at_once) == 120.0


def hold(count: int) -> list[int]:
    return ids(device_set().add_slice(devices=count).devices)


def on_slice() -> list[float]:
    (s,) = device_set().slices
    x = jax.device_put(np.arange(8.0), NamedSharding(s.mesh("x"), PartitionSpec("x")))
    y = jax.jit(lambda v: v * 3)(x)
    return np.asarray(y).tolist()


def test_sessions_are_spread_and_their_slices_are_shown(
    mesh_cluster: StandingCluster, start_python: StartPython
) -> None:
    mesh_cluster.until(lambda report: not report["sessions"], 10)
    children = [start_python(ATOLL_ADDRESS=mesh_cluster.address) for _ in range(3)]
    found = [child.call(hold, 4) for child in children]
    assert [each[0] // 4 for each in found] == [0, 1, 0]
    for child in children:
        assert child.call(on_slice) == [3.0 * i for i in range(8)]
    sessions = mesh_cluster.report()["sessions"]
    assert [session["slices"][0]["physical"] for session in sessions] == found
    for child in children:
        child.close()
