"""Computations over islands that are stopped, or whose client ends: they end on all islands, and others continue."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 120.0

# A cluster and several clients take more CPU time than the suite has for this. `tests/controller/test_overruns.py` has
# the decisions, and `tests/devices/xla/test_gloo_connections.py` how connections of collectives are closed.
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    tenants = (
        TenantSettings("ana", token_hash("ana's token")),
        TenantSettings("eve", token_hash("eve's token"), run_seconds=2),
        TenantSettings("dan", token_hash("dan's token"), run_seconds=2),
    )
    return start_cluster(islands="2x1x2", token="the token of the cluster", tenants=tenants)


@pytest.fixture(scope="module")
def ana(cluster: StandingCluster, start_python: StartPython) -> RemotePython:
    user = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="ana's token")
    user.call(keep)
    assert user.call(sums) == [499500.0] * 3
    return user


@pytest.fixture
def eve(cluster: StandingCluster, start_python: StartPython) -> RemotePython:
    return start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="eve's token")


# ---- called in the clients

_kept: list[jax.Array] = []


def over_all() -> NamedSharding:
    return over(range(len(jax.devices())))


def over(numbers: Iterable[int]) -> NamedSharding:
    return NamedSharding(Mesh(np.array([jax.devices()[each] for each in numbers]), ("x",)), PartitionSpec("x"))


def keep() -> None:
    """Keep an array on each island and one over both."""
    content = np.arange(1000, dtype=np.float32)
    _kept.extend(jax.device_put(content, each) for each in (jax.devices()[0], jax.devices()[2], over_all()))


def sums() -> list[float]:
    return [float(each.sum()) for each in _kept]


def sum_on_the_second_island() -> float:
    return float(_kept[1].sum())


def start_loop(has_collectives: bool, devices: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """Start a loop without end over both islands, without waiting for it."""
    x = jax.device_put(np.zeros(2 * len(devices), np.float32), over(devices))
    if has_collectives:
        run = jax.jit(lambda x: jax.lax.while_loop(lambda v: jnp.max(v) < 2, lambda v: v * 0.5 + 0.5, x))
    else:
        inner = lambda x: jax.lax.while_loop(lambda v: v[0] < 2, lambda v: v * 0.5 + 0.5, x)  # noqa: E731
        run = jax.jit(jax.shard_map(inner, mesh=x.sharding.mesh, in_specs=x.sharding.spec, out_specs=x.sharding.spec))
    _kept.append(run(x))


def loop(has_collectives: bool, devices: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """Wait for a loop without end."""
    start_loop(has_collectives, devices)
    _kept[-1].block_until_ready()


def call_back(kind: str) -> None:
    """Start a computation over both islands that calls back again and again, and return after the first call."""
    called = threading.Event()

    def called_back(value: Any) -> Any:
        called.set()
        return np.asarray(value)

    def body(_: Any, v: Any) -> Any:
        total = jnp.sum(v)
        if kind == "debug":
            jax.debug.callback(called_back, total)
        elif kind == "pure":
            total = jax.pure_callback(called_back, jax.ShapeDtypeStruct((), v.dtype), total)
        else:
            total = io_callback(called_back, jax.ShapeDtypeStruct((), v.dtype), total, ordered=False)
        return v + total * 0

    x = jax.device_put(np.zeros(8, np.float32), over_all())
    _kept.append(jax.jit(lambda x: jax.lax.fori_loop(0, 10_000_000, body, x))(x))
    assert called.wait(SECONDS)


def stopped(report: dict[str, Any]) -> int:
    return sum(event["kind"] == "stopped" for event in report["events"])


def restarts(report: dict[str, Any]) -> list[int]:
    return [island["restarts"] for island in report["islands"]]


# ---- tests


@pytest.mark.parametrize("has_collectives", [True, False])
def test_a_loop_over_islands_is_stopped_on_all_of_them(
    cluster: StandingCluster, ana: RemotePython, eve: RemotePython, has_collectives: bool
) -> None:
    check_stop(cluster, ana, eve, has_collectives)


@pytest.mark.parametrize("devices", [(1, 2), (0, 2, 3)])
def test_a_loop_on_some_devices_of_hosts_is_stopped(
    cluster: StandingCluster, ana: RemotePython, start_python: StartPython, devices: tuple[int, ...]
) -> None:
    dan = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="dan's token")
    check_stop(cluster, ana, dan, False, devices)


def check_stop(cluster: StandingCluster, ana: RemotePython, other: RemotePython, *arguments: Any) -> None:
    """Check that a loop of another tenant is stopped while ana waits, and that ana loses nothing."""
    stops = stopped(cluster.report())
    other.begin(loop, *arguments)
    while stopped(cluster.report()) == stops:
        assert ana.call(sum_on_the_second_island, seconds=SECONDS) == 499500.0
    with pytest.raises(RemoteError, match=r"was stopped: it ran for . s while others waited.*run_seconds"):
        other.finish(SECONDS)
    cluster.until(lambda report: not any(each["in_flight"] for each in report["sessions"]), SECONDS)
    assert ana.call(sums, seconds=SECONDS) == [499500.0] * 3
    assert restarts(cluster.report()) == [0, 0]
    other.close()


@pytest.mark.parametrize("has_collectives", [True, False])
def test_a_loop_over_islands_whose_client_is_killed_is_stopped(
    cluster: StandingCluster, ana: RemotePython, start_python: StartPython, has_collectives: bool
) -> None:
    doomed = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="ana's token")
    doomed.call(start_loop, has_collectives)
    cluster.until(lambda report: any(each["in_flight"] for each in report["sessions"]), SECONDS)
    doomed.process.kill()
    doomed.process.wait()
    assert ana.call(sums, seconds=SECONDS) == [499500.0] * 3
    assert restarts(cluster.report()) == [0, 0]


@pytest.mark.parametrize("kind", ["debug", "pure", "io"])
def test_a_computation_over_islands_ends_with_the_client_that_it_calls(
    cluster: StandingCluster, ana: RemotePython, start_python: StartPython, kind: str
) -> None:
    doomed = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="ana's token")
    doomed.call(call_back, kind)
    doomed.process.kill()
    doomed.process.wait()
    assert ana.call(sums, seconds=SECONDS) == [499500.0] * 3
    cluster.until(lambda report: len(report["sessions"]) == 1, SECONDS)
    assert restarts(cluster.report()) == [0, 0]
