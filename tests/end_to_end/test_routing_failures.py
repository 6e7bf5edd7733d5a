"""Tests of routing rows while workers are killed or stopped, or while memory is short: errors are named, and nothing
hangs.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

LEASE_SECONDS = 3.0
BACK_SECONDS = 300.0
DEVICE_MEMORY = 4 << 20


@pytest.fixture(scope="module")
def standing(start_cluster: StartCluster) -> StandingCluster:
    """Start two islands of one device each, with a little more memory than one block."""
    return start_cluster(islands="2x1x1", lease_seconds=LEASE_SECONDS, device_memory=DEVICE_MEMORY)


@pytest.fixture(scope="module")
def users(start_python: StartPython, standing: StandingCluster) -> list[RemotePython]:
    return [start_python(ATOLL_ADDRESS=standing.address) for _ in range(2)]


# ---- functions that run in users' processes


def _step(rows: Any, here: int, capacity: int) -> Any:
    """Send rows of one island through both islands, and back."""
    import jax

    import atoll

    to = [jax.devices()[here], jax.devices()[1 - here]]
    chosen = jax.jit(lambda rows: (rows[:, 0] % 2).astype(int))(rows)
    blocks, routing = atoll.route(rows, chosen, to=to, capacity=capacity)
    return atoll.unroute([block + 1 for block in blocks], routing)


def _rows(here: int) -> Any:
    import jax
    import numpy as np

    return jax.device_put(np.arange(64.0, dtype=np.float32).repeat(16).reshape(64, 16), jax.devices()[here])


def steps(here: int, capacity: int, count: int) -> float:
    """Run this many steps, each on the previous result. Return the first element of the last result."""
    rows = _rows(here)
    for _ in range(count):
        rows = _step(rows, here, capacity)
    return float(rows[0, 0])


_kept: list[Any] = []


def keep() -> None:
    """Keep an array on each island. A worker that is lost between two steps loses at least this array."""
    import jax

    _kept[:] = jax.block_until_ready([jax.device_put(0.0, device) for device in jax.devices()])


def until_it_fails(here: int) -> str:
    try:
        while True:
            steps(here, 64, 10)
            assert [float(each + 0) for each in _kept] == [0.0, 0.0]
    except Exception as error:
        return str(error)


# ---- what tests check


@pytest.mark.parametrize(
    ("host", "struck", "status"),
    [(1, signal.SIGKILL, "UNAVAILABLE"), (0, signal.SIGSTOP, "DEADLINE_EXCEEDED")],
)
def test_a_worker_that_is_lost_while_rows_are_on_their_way_is_named_and_comes_back(
    standing: StandingCluster, users: list[RemotePython], host: int, struck: signal.Signals, status: str
) -> None:
    user = users[0]
    assert user.call(steps, 0, 64, 3) == 3.0
    user.call(keep)
    launches = standing.report()["sessions"][0]["launches"]
    user.begin(until_it_fails, 0)
    standing.until(lambda report: report["sessions"][0]["launches"] > launches, 60.0)
    standing.worker(host).send_signal(struck)
    error = user.finish()
    assert f"host {host}" in error
    assert error.startswith((status, "DATA_LOSS"))
    standing.until(lambda report: all(island["state"] == "ready" for island in report["islands"]), BACK_SECONDS)
    assert user.call(steps, 0, 64, 3) == 3.0


def test_where_memory_is_for_one_block_at_a_time_routes_in_both_directions_wait_and_never_for_one_another(
    users: list[RemotePython],
) -> None:
    """Each block takes 1.25 MiB of 4. Each of two users holds up to three of them on both islands."""
    capacity = (5 << 18) // 64
    for here, user in enumerate(users):
        user.begin(steps, here, capacity, 20)
    assert [user.finish() for user in users] == [20.0, 20.0]
