"""Tests that collectives of several clients on the same two hosts are correct together."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

# The project promises a minute: ATOLL_ORDER_SECONDS=60.
SECONDS = float(os.environ.get("ATOLL_ORDER_SECONDS", "1"))
# Unfinished work after this time has deadlocked.
DEADLOCK_SECONDS = 7.0
WITHOUT_ORDER = Path(__file__).with_name("without_order")


def collectives(kind: str, scale: float, seconds: float) -> int:
    """Run unfenced collectives on all devices for this long, a hundred in flight, and check each.

    Return their number.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))
    spec = PartitionSpec("x")

    def reduce(x: Any) -> Any:
        return x * 0 + jax.lax.psum(x.sum(), "x")

    def gather(x: Any) -> Any:
        return x * 0 + jax.lax.all_gather(x, "x", tiled=True)[-1]

    body = {"reduce": reduce, "gather": gather}[kind]
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    values = np.arange(64.0 * mesh.size) * scale
    expected = np.full_like(values, values.sum() if kind == "reduce" else values[-1])
    x = jax.device_put(values, NamedSharding(mesh, spec))
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        results = [step(x) for _ in range(100)]
        for result in results:
            np.testing.assert_array_equal(np.asarray(result), expected)
        count += len(results)
    return count


def begin(
    start_python: StartPython, cluster: StandingCluster, seconds: float, *work: tuple[str, float]
) -> list[RemotePython]:
    clients = [start_python(ATOLL_ADDRESS=cluster.address) for _ in work]
    for client, (kind, scale) in zip(clients, work, strict=True):
        client.begin(collectives, kind, scale, seconds)
    return clients


def test_clients_with_different_collectives_all_get_right_results(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    cluster = start_cluster(islands="1x2x2")
    clients = begin(start_python, cluster, SECONDS, ("reduce", 1.0), ("gather", 1.0), ("reduce", 10.0))
    counts = [client.finish(SECONDS + 60) for client in clients]
    assert min(counts) >= 100


@pytest.mark.slow
@pytest.mark.thorough(only="the time until it fails is random")
def test_without_the_order_the_same_work_fails(start_cluster: StartCluster, start_python: StartPython) -> None:
    """Check that the test above can fail."""
    cluster = start_cluster(islands="1x2x2", environment={"PYTHONPATH": str(WITHOUT_ORDER)})
    clients = begin(start_python, cluster, SECONDS, ("reduce", 1.0), ("gather", 1.0), ("reduce", 10.0))
    end = time.monotonic() + SECONDS + DEADLOCK_SECONDS
    outcomes = []
    for client in clients:
        try:
            outcomes.append(client.finish(max(0.0, end - time.monotonic())))
        except (RemoteError, AssertionError) as error:  # a missing answer is a deadlock
            outcomes.append(f"{type(error).__name__}: {error}")
            client.process.kill()  # it waits forever
    assert any(isinstance(outcome, str) for outcome in outcomes), outcomes
