"""Tests of memory pressure with real scripts: idle arrays spill or sessions are suspended for a higher priority, and
are restored later.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll.cluster.settings import SuspendLower
from atoll.cluster.tenant_settings import TenantSettings, token_hash
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

MIB = 1 << 20
_TENANTS = (
    TenantSettings("low", token_hash("low's token")),
    TenantSettings("high", token_hash("high's token"), priority=1),
)
# A device cannot hold the arrays of both. Summing one up takes a little more than twice its memory.
_DEVICE, _OF_LOW, _OF_HIGH = 52 * MIB, 16 * MIB, 40 * MIB
_PATIENCE_SECONDS = 300.0


# ---- functions that scripts run

_kept: dict[str, Any] = {}
# On the device, since an array that was read whole shares its memory with one of JAX, and does not spill.
_sum = jax.jit(lambda x: jnp.sum(x))
_sum_of_mixed = jax.jit(lambda x: jnp.sum(x ^ (x >> 3)))


def digest() -> tuple[int, int]:
    return int(_sum(_kept["array"])), int(_sum_of_mixed(_kept["array"]))


def keep(seed: int) -> tuple[int, int]:
    """Make an array and keep it."""
    _kept["array"] = jax.device_put(np.random.default_rng(seed).integers(0, 1 << 31, _OF_LOW // 4, np.int32))
    return digest()


def fill() -> None:
    _kept["array"] = jax.device_put(np.zeros(_OF_HIGH // 4, np.int32)).block_until_ready()


def drop() -> None:
    _kept["array"].delete()
    _kept.clear()


def change_until(progress: str, end: str) -> tuple[int, int]:
    """Change the array in place, and back, until the file `end` exists."""
    change = jax.jit(lambda x: x ^ 12345, donate_argnums=0)
    while not Path(end).exists():
        for _ in range(2):
            _kept["array"] = change(_kept["array"])
        _kept["array"].block_until_ready()
        Path(progress).touch()
    return digest()


# ---- tests


def start(
    start_cluster: StartCluster, start_python: StartPython, **settings: Any
) -> tuple[StandingCluster, RemotePython, RemotePython]:
    """Start a cluster of one device, with scripts of a tenant with a low priority and of one with a high priority."""
    cluster = start_cluster(
        islands="1x1x1", device_memory=_DEVICE, token="the token of the cluster", tenants=_TENANTS, **settings
    )
    low, high = (start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN=f"{name}'s token") for name in ("low", "high"))
    return cluster, low, high


def until(cluster: StandingCluster, python: RemotePython, state: str) -> dict[str, Any]:
    """Wait until the script's session is in this state, or until the script has no session if `state` is "".

    Return the session's report.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        (row,) = [each for each in cluster.report()["sessions"] if each["pid"] == python.pid]
        if (row.get("state") or "").startswith(state):
            return dict(row)
        assert time.monotonic() < deadline, row
        time.sleep(0.05)


def test_an_idle_array_makes_room_for_a_higher_priority_and_comes_back_with_its_bits(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    cluster, low, high = start(start_cluster, start_python, spill=64 * MIB)
    before = low.call(keep, 1)
    high.call(fill)
    assert until(cluster, low, "")["spilled_bytes"] == _OF_LOW
    high.call(drop)
    assert low.call(digest) == before


@pytest.mark.parametrize("how", [SuspendLower.MEMORY, pytest.param(SuspendLower.DISK, marks=pytest.mark.thorough)])
def test_a_session_makes_room_for_a_higher_priority_and_goes_on_with_its_bits(
    start_cluster: StartCluster, start_python: StartPython, tmp_path: Path, how: SuspendLower
) -> None:
    cluster, low, high = start(
        start_cluster, start_python, suspend_lower=how, suspend_directory=str(tmp_path / "spilled")
    )
    before, progress, end = low.call(keep, 1), tmp_path / "progress", tmp_path / "end"
    low.begin(change_until, str(progress), str(end))
    until_there(progress)
    high.call(fill)
    until(cluster, low, "suspended")
    high.call(drop)
    progress.unlink()
    until_there(progress)
    end.touch()
    assert low.finish() == before


def until_there(path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"the script makes no progress: no {path.name}"
        time.sleep(0.01)
