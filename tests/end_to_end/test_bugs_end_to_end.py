"""Tests of bugs in Atoll: a bug ends its process, is reported as the reason, and does not affect other islands."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConnectError
from tests import faults
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.quick_xla import quick

BACK_SECONDS = 60.0
# Places of bugs, by thread: the executor, the completions of a device, a pool's thread, and the message thread.
PLACES = {
    "watch": "atoll.worker.completion_reporter:CompletionReporter.watch",
    "store": "atoll.worker.store:Store.forget",
    "completions": "atoll.worker.completions:CompletionWatcher._report_completed",
    "compile": "atoll.worker.host_functions:HostFunctions._work_on",
    "messages": "atoll.worker.message_handler:MessageHandler.handle",
}
state: dict[str, Any] = {}


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, module_directory: Path) -> StandingCluster:
    """Start two islands. A worker fails at a given place when the file with that name and the worker's pid exists.

    Without the pid, the worker of the other island could find the file first, for example at a ping.
    """
    injected = {place: f"raises_if_own_file:{module_directory / name}" for name, place in PLACES.items()}
    return start_cluster(faults.environment(injected, quick({})), islands="2x1x1", has_bugs=True)


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


def compute_until_it_fails(directory: str, name: str, pid: int) -> str:
    """Create the file of a bug in worker `pid`, and run a function until it fails. Return the error."""
    import functools

    import jax
    import numpy as np

    x = jax.block_until_ready(jax.device_put(np.ones(100_000), state["device"]))
    step = jax.jit(lambda x: (x * x).sum() / x.size * x)
    jax.block_until_ready(step(x))
    (Path(directory) / f"{name}.{pid}").touch()
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
    island = cluster.report()["islands"][0]
    restarts, pid = island["restarts"], island["hosts"][0]["pid"]
    error = user.call(compute_until_it_fails, str(module_directory), name, pid, seconds=BACK_SECONDS)
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


# ---- the controller


def step() -> float:
    import jax

    return float(jax.jit(lambda x: x + 1)(state["kept"]))


def launch_with_seven_arguments() -> str:
    import jax

    try:
        for _ in range(1000):
            jax.block_until_ready(jax.jit(lambda *seven: sum(seven))(*[state["kept"]] * 7))
    except Exception as error:
        return str(error)
    return ""


def steps_until_one_fails() -> str:
    try:
        while True:
            step()
    except Exception as error:
        return str(error)


def failing_controller(start_ready: Path) -> dict[str, str]:
    """Return an environment in which a launch with seven arguments raises, and a turn of the controller if a file
    exists.
    """
    places = {
        "atoll.launch.launcher:Launcher.launch_within_window": "raises_if:len(arguments[2].arguments) == 7",
        "atoll.launch.gang_starts:GangStarts.start_ready": f"raises_if_file:{start_ready}",
    }
    return faults.environment(places, quick({}))


def log_of(cluster: StandingCluster) -> str:
    return (cluster.directory.parent / "log").read_text()


def test_a_bug_at_a_sessions_message_ends_that_session_alone_and_is_not_repeated(
    start_cluster, start_python, module_directory
):
    journal, start_ready = module_directory / "journal", module_directory / "start_ready"
    cluster = start_cluster(
        failing_controller(start_ready), islands="1x1x1", journal=str(journal), grace_seconds=60.0, has_bugs=True
    )
    user, neighbor = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2))
    for each in (user, neighbor):
        each.call(keep, 0)
        assert each.call(step) == 22.0
    error = user.call(launch_with_seven_arguments, seconds=BACK_SECONDS)
    until(cluster, lambda report: len(report["sessions"]) == 1)
    assert "the controller failed at a message of this client (Launch: TypeError: an injected bug" in error
    assert "gone" not in error
    assert neighbor.call(step, seconds=BACK_SECONDS) == 22.0

    start_ready.touch()  # a bug at the end of a turn
    report = until(cluster, lambda report: restarts(report) == 2)
    assert neighbor.call(step, seconds=BACK_SECONDS) == 22.0
    assert report["islands"][0]["restarts"] == 0
    assert log_of(cluster).count("the controller failed and ends: ") == 2
    assert "the controller failed: TypeError: an injected bug" in log_of(cluster)


def until(cluster: StandingCluster, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the report as soon as `holds(report)` is true. There is no report while the controller restarts."""
    deadline = time.monotonic() + BACK_SECONDS
    while True:
        with contextlib.suppress(ConnectError):
            report = cluster.report()
            if holds(report):
                return report
        assert time.monotonic() < deadline
        time.sleep(0.1)


def restarts(report: dict[str, Any]) -> int:
    return sum(event["kind"] == "controller restarted" for event in report["events"])


@pytest.mark.thorough
def test_without_a_journal_the_cluster_ends_with_the_bug_as_its_reason(start_cluster, start_python, module_directory):
    cluster = start_cluster(failing_controller(module_directory / "no file"), islands="1x1x1", has_bugs=True)
    user, neighbor = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2))
    for each in (user, neighbor):
        each.call(keep, 0)
    neighbor.begin(steps_until_one_fails)
    error = user.call(launch_with_seven_arguments)
    assert "the controller failed at a message of this client (Launch: TypeError: an injected bug" in error
    error = neighbor.finish(BACK_SECONDS)
    assert "the controller failed, and the cluster has ended (Launch: TypeError: an injected bug" in error
    cluster.wait()
    assert "the cluster ends: the controller failed: Launch: TypeError" in log_of(cluster)
