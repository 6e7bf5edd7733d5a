"""Tests of XLA's time limits: a collective waits as long as a device runs another session's program."""

from __future__ import annotations

import functools
import time
from typing import Any

from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StartCluster
from tests.quick_xla import quick

# These replace XLA's own limits of 20 s and 40 s.
LIMIT_SECONDS = 1
HOLD_SECONDS = 3.0  # longer than both together


@functools.cache
def counting() -> Any:
    """XLA runs it in a separate thread, since its loop does not look cheap."""
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda n, x: jax.lax.fori_loop(0, n, lambda _, y: jnp.sin(x @ y), x))


def count(loops: int) -> float:
    """Run a computation on one device whose duration depends on `loops`."""
    import jax
    import jax.numpy as jnp

    return float(counting()(*jax.device_put((loops, jnp.eye(64)), jax.devices()[0]))[0, 0])


def loops_for(seconds: float) -> int:
    """Return the number of loops for which `count` takes at least about this long."""
    count(1)  # compiled
    loops, took = 16, 0.0
    while took < seconds / 8:
        loops *= 2
        begun = time.monotonic()
        count(loops)
        took = time.monotonic() - begun
    return int(loops * seconds / took)


@functools.cache
def everywhere() -> tuple[Any, Any]:
    """Return a collective on all devices, and an array for it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(jax.devices(), ("x",)), PartitionSpec("x"))
    return jax.jit(jnp.sum), jax.device_put(jnp.ones(len(jax.devices())), sharding)


def sum_over_all() -> float:
    """Launch once, so that it is in flight beside the launch that takes long."""
    total, x = everywhere()
    return float(total(x))


def test_a_collective_waits_for_another_sessions_program_without_a_limit(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    kinds = ("warn_stuck", "terminate")  # the second limit starts when the first has passed
    flags = " ".join(f"--xla_cpu_collective_call_{kind}_timeout_seconds={LIMIT_SECONDS}" for kind in kinds)
    cluster = start_cluster(quick({"XLA_FLAGS": flags}), islands="1x1x4")
    holder = start_python(ATOLL_ADDRESS=cluster.address)
    other = start_python(ATOLL_ADDRESS=cluster.address)
    assert other.call(sum_over_all) == 4.0  # compiled
    holder.begin(count, holder.call(loops_for, HOLD_SECONDS))
    cluster.until(lambda report: report["islands"][0]["in_flight"] >= 1, 30)
    other.begin(sum_over_all)
    cluster.until(lambda report: report["islands"][0]["in_flight"] == 2, 30)
    holder.finish()
    assert other.finish() == 4.0
    assert cluster.report()["islands"][0]["restarts"] == 0
