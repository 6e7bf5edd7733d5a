"""Tests that long runs of tenants are stopped, and that nobody else loses anything."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from tests.end_to_end.remote_python import RemoteError, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 60.0


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    tenants = (
        TenantSettings("ana", token_hash("ana's token")),
        TenantSettings("eve", token_hash("eve's token"), run_seconds=1),
        TenantSettings("mel", token_hash("mel's token"), run_seconds=1),  # launches are refused after three stops
    )
    return start_cluster(islands="1x1x2", token="the token of the cluster", tenants=tenants)


# ---- functions that clients run

_kept: list[jax.Array] = []


def keep() -> None:
    _kept.append(jax.device_put(np.arange(1000, dtype=np.float32), jax.devices()[0]))


def kept_sum() -> float:
    return float(_kept[0].sum())


def loop_on(devices: int) -> str:
    """Run a loop without end on some devices. Return the error."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    x = jax.device_put(np.zeros(2, np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    run = jax.jit(lambda x: jax.lax.while_loop(lambda v: v.max() < 2, lambda v: v * 0.5 + 0.5, x))
    run(x).block_until_ready()
    return "it ended"


def loop_on_the_last_device() -> str:
    """Run a loop that only one of two devices does not end. Return the error."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    inner = lambda x: jax.lax.while_loop(lambda v: v[0] != 1, lambda v: v * 0.5 + 1.0, x)  # noqa: E731
    run = jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec))
    run(jax.device_put(np.array([1, 2], np.float32), jax.sharding.NamedSharding(mesh, spec))).block_until_ready()
    return "it ended"


def loop_behind_short_work(iterations: int) -> str:
    """Run a loop that ends, and behind it a short program and a loop without end. Return the error."""
    x = jax.device_put(1, jax.devices()[0])
    count = jax.jit(lambda x, n: jax.lax.while_loop(lambda v: v < n, lambda v: v + 1, x))
    add, loop = jax.jit(lambda x: x + 1), jax.jit(lambda x: jax.lax.while_loop(lambda v: v >= 0, lambda v: v * 0, x))
    count(x, 10).block_until_ready()
    add.lower(x).compile()
    loop.lower(x).compile()
    loop(add(count(x, iterations))).block_until_ready()
    return "it ended"


def follow_for_ever() -> None:
    """Launch work without waiting for its end."""
    follow = lambda v: (v * 1103515245 + 12345) & 0x7FFFFFFF  # noqa: E731
    jax.jit(lambda x: jax.lax.while_loop(lambda v: v >= 0, follow, x))(jax.device_put(1, jax.devices()[0]))


def stopped(report: dict[str, Any]) -> list[str]:
    return [event["text"] for event in report["events"] if event["kind"] == "stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.thorough), 2, 0], ids=["one", "two", "the last"])
def test_a_loop_of_a_tenant_that_keeps_another_waiting_is_stopped(
    cluster: StandingCluster, start_python: StartPython, devices: int
) -> None:
    ana = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="ana's token")
    eve = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="eve's token")
    ana.call(keep)
    assert ana.call(kept_sum) == 499500.0
    stops = len(stopped(cluster.report()))
    if devices:
        eve.begin(loop_on, devices)
    else:
        eve.begin(loop_on_the_last_device)
    while len(stopped(cluster.report())) == stops:
        assert ana.call(kept_sum, seconds=SECONDS) == 499500.0
    with pytest.raises(RemoteError, match=r"was stopped: it ran for . s while others waited.*run_seconds"):
        eve.finish(SECONDS)
    report = cluster.report()
    assert [island["restarts"] for island in report["islands"]] == [0]
    ana.close()
    eve.close()


def test_a_loop_that_follows_short_work_at_once_is_stopped(cluster: StandingCluster, start_python: StartPython) -> None:
    ana = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="ana's token")
    mel = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="mel's token")
    ana.call(keep)
    mel.begin(loop_behind_short_work, 5_000_000)
    stops = len(stopped(cluster.report()))
    while len(stopped(cluster.report())) == stops:
        assert ana.call(kept_sum, seconds=SECONDS) == 499500.0
    with pytest.raises(RemoteError, match=r"the run of jit__lambda was stopped"):
        mel.finish(SECONDS)
    assert [island["restarts"] for island in cluster.report()["islands"]] == [0]
    ana.close()
    mel.close()


def test_a_loop_whose_client_is_killed_is_stopped(cluster: StandingCluster, start_python: StartPython) -> None:
    ana = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="ana's token")
    doomed = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="ana's token")
    ana.call(keep)
    doomed.call(follow_for_ever)
    cluster.until(lambda report: any(each["in_flight"] for each in report["sessions"]), SECONDS)
    doomed.process.kill()
    assert ana.call(kept_sum, seconds=SECONDS) == 499500.0
    assert [island["restarts"] for island in cluster.report()["islands"]] == [0]
    ana.close()
