"""A bug in Atoll ends the process that has it, is reported as the reason, and costs no other island anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests import faults
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.quick_xla import quick

BACK_SECONDS = 60.0
# By the thread that has it: the executor's, that of a device's completions, one of a pool, the one of messages.
PLACES = {
    "watch": "atoll.worker.endings:Endings.watch",
    "store": "atoll.worker.store:Store.free",
    "completions": "atoll.worker.completions:CompletionWatcher._report_completed",
    "compile": "atoll.worker.functions:Functions._start",
    "messages": "atoll.worker.message_handler:MessageHandler.handle",
}
state: dict[str, Any] = {}


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, module_directory: Path) -> StandingCluster:
    """Two islands, whose workers fail at a place once its file is there."""
    injected = {place: f"raises_if_file:{module_directory / name}" for name, place in PLACES.items()}
    return start_cluster(faults.environment(injected, quick({})), islands="2x1x1")


@pytest.fixture(scope="module")
def neighbor(start_python: StartPython, cluster: StandingCluster) -> RemotePython:
    python = start_python(ATOLL_ADDRESS=cluster.address)
    python.call(keep, 1)
    return python


@pytest.fixture(scope="module")
def user(start_python: StartPython, cluster: StandingCluster) -> RemotePython:
    return start_python(ATOLL_ADDRESS=cluster.address)


def keep(island: int) -> None:
    import jax

    state["device"] = next(each for each in jax.devices() if each.slice_index == island)
    state["kept"] = jax.block_until_ready(jax.device_put(21.0, state["device"]))


def kept() -> float:
    return float(state["kept"] * 2)


def compute_until_it_fails(directory: str, name: str) -> str:
    """Ask for the bug while a function runs again and again; the error that this has."""
    import functools

    import jax
    import numpy as np

    x = jax.block_until_ready(jax.device_put(np.ones(100_000), state["device"]))
    step = jax.jit(lambda x: (x * x).sum() / x.size * x)
    jax.block_until_ready(step(x))
    (Path(directory) / name).touch()
    try:
        for power in range(10_000):
            jax.block_until_ready(step(x))
            if name == "compile":
                jax.block_until_ready(jax.jit(functools.partial(jax.lax.integer_pow, y=power + 2))(x))
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", PLACES)
def test_a_bug_in_a_worker_ends_it_and_is_the_reason_of_the_loss(name, cluster, user, neighbor, module_directory):
    user.call(keep, 0)
    restarts = cluster.report()["islands"][0]["restarts"]
    error = user.call(compute_until_it_fails, str(module_directory), name, seconds=BACK_SECONDS)
    place = r"TypeError: an injected bug" + (r" \(worker/\w+\.py:\d+\)" if name != "compile" else "")
    assert re.search(rf"the worker of host 0 failed: {place}", error), error
    report = cluster.until(lambda report: report["islands"][0]["state"] == "ready", BACK_SECONDS)
    assert report["islands"][0]["restarts"] == restarts + 1
    assert re.search(place, report["islands"][0]["last_failure"])
    assert report["islands"][1]["restarts"] == 0
    assert neighbor.call(kept) == 42.0
    log = (cluster.directory.parent / "log").read_text()
    assert "the worker of host 0 fails, and ends: TypeError: an injected bug" in log
    assert "raise TypeError" in log, "with its traceback"
