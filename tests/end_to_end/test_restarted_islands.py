"""Tests of launches that wait for an island, on real processes: they run after its restart if their inputs still exist.

The tables of such launches are in `tests/launch/test_survivors.py`.
"""

from __future__ import annotations

import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import atoll
from atoll.cluster.settings import Dispatch
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 300.0
LOST = "(its argument 0, int64[] made by device_put, was stored there) (in jit__lambda)"
LARGE = 1 << 20  # 8-byte numbers, more than the buffers of a socket can hold


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    """Start two islands of one device each that delegate a session's programs to hosts at once."""
    return start_cluster(islands="2x1x1", delegate_after_seconds=0.0)


@pytest.fixture(scope="module")
def user(start_python: StartPython, cluster: StandingCluster) -> RemotePython:
    python = start_python(ATOLL_ADDRESS=cluster.address)
    python.call(begin)
    return python


# ---- functions that scripts run

state: dict[str, Any] = {}


def begin() -> None:
    """Compile all functions, and run them."""
    make, double = jax.jit(lambda: jnp.arange(3.0)), jax.jit(lambda x: x * 2)
    loop = jax.jit(lambda x: jax.lax.while_loop(lambda v: v >= 0, lambda v: (v * 1103515245 + 12345) & 0x7FFFFFFF, x))
    loop.lower(jax.device_put(np.int64(1), jax.devices()[0])).compile()
    state.update(make=make, double=double, loop=loop)
    for device in jax.devices():
        double(jax.device_put(make(), device)).block_until_ready()
    double(jax.device_put(np.ones(LARGE), jax.devices()[0])).block_until_ready()


def run_for_ever() -> Any:
    return state["loop"](jax.device_put(np.int64(1), jax.devices()[0]))


def loop_and_make() -> None:
    """Launch a loop without end. Behind it, make an array, use it, and drop it."""
    state["results"] = [run_for_ever(), state["double"](state["make"]())]


def put(value: float) -> None:
    """Send a large array and a small one to device 0, and use each."""
    device = jax.devices()[0]
    arrays = [np.full(LARGE, value), np.full(3, value)]
    state["results"] = [state["double"](jax.device_put(each, device)) for each in arrays]


def move() -> None:
    """Launch a loop on device 0. Behind it, make an array, and move it to device 1."""
    loop, made = run_for_ever(), state["make"]()
    state["results"] = [loop, made, state["double"](jax.device_put(made, jax.devices()[1]))]


def step_twice() -> None:
    """Launch a program twice on an array of the second island. Hosts of both islands run it by themselves."""
    double, (here, there) = state["double"], jax.devices()

    @atoll.program
    def step(x: Any) -> Any:
        for _ in range(3):
            x = double(jax.device_put(double(jax.device_put(x, here)), there))
        return x

    step, x = state.setdefault("step", (step, jax.device_put(np.arange(3.0), there)))
    state["results"] = [step(x), step(x)]


def sums() -> list[float | str]:
    """Return the sum of each result, or its error."""
    found: list[float | str] = []
    for each in state["results"]:
        try:
            found.append(float(np.asarray(each).sum()))
        except Exception as error:
            found.append(str(error))
    return found


# ---- the tests


def in_flight(cluster: StandingCluster, count: int) -> None:
    cluster.until(lambda report: sum(each["in_flight"] for each in report["sessions"]) >= count, SECONDS)


def kill_and_restart(cluster: StandingCluster) -> None:
    """Kill the worker of island 0, and wait for the restart. A script that reads afterwards learns of the loss."""
    restarts = cluster.report()["islands"][0]["restarts"]
    cluster.worker(0).kill()
    cluster.until(lambda report: report["islands"][0]["restarts"] > restarts, SECONDS)


def is_back(cluster: StandingCluster) -> None:
    cluster.until(lambda report: all(each["state"] == "ready" for each in report["islands"]), SECONDS)


def test_bytes_that_were_sent_to_a_worker_and_not_read_are_sent_again(cluster, user):
    worker = cluster.worker(0)
    worker.send_signal(signal.SIGSTOP)
    user.begin(put, 1.5)
    in_flight(cluster, 2)
    worker.kill()
    user.finish(SECONDS)
    assert user.call(sums, seconds=SECONDS) == [3.0 * LARGE, 9.0]
    is_back(cluster)


def test_launches_that_arrive_while_their_island_restarts_run_afterwards(cluster, user):
    restarts = cluster.report()["islands"][0]["restarts"]
    cluster.worker(0).kill()
    user.begin(put, 2.5)  # the proxy may not know of the loss yet
    cluster.until(lambda report: report["islands"][0]["restarts"] > restarts, SECONDS)
    user.finish(SECONDS)
    assert user.call(sums, seconds=SECONDS) == [5.0 * LARGE, 15.0]
    is_back(cluster)


def test_a_run_that_was_granted_to_hosts_behind_another_runs_after_the_restart(cluster, user):
    user.call(step_twice)
    assert user.call(sums) == [3.0 * 2**6] * 2
    worker = cluster.worker(0)
    worker.send_signal(signal.SIGSTOP)
    user.begin(step_twice)
    in_flight(cluster, 2)
    worker.kill()
    user.finish(SECONDS)
    first, second = user.call(sums, seconds=SECONDS)
    assert "(its hosts had started it) (in step)" in first
    assert second == 3.0 * 2**6
    is_back(cluster)


def test_of_launches_over_two_islands_the_error_says_why_they_are_lost(cluster, user):
    user.call(move)
    in_flight(cluster, 4)
    kill_and_restart(cluster)
    loop, made, moved = user.call(sums, seconds=SECONDS)
    assert LOST in loop
    assert made == 3.0
    assert "DATA_LOSS: host 0 of island 0 is gone" in moved
    assert "(hosts of other islands may have begun it) (in device_put)" in moved
    is_back(cluster)


@pytest.mark.thorough
def test_with_sequential_dispatch_launches_behind_a_loop_run_after_the_restart(start_cluster, start_python):
    sequential = start_cluster(islands="1x1x1", dispatch=Dispatch.SEQUENTIAL)
    python = start_python(ATOLL_ADDRESS=sequential.address)
    python.call(begin)
    python.call(loop_and_make)
    in_flight(sequential, 3)
    kill_and_restart(sequential)
    loop, made = python.call(sums, seconds=SECONDS)
    assert LOST in loop
    assert made == 6.0
    python.close()
