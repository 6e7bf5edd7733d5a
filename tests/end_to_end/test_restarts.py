"""The controller is killed, and another one goes on where it was: clients get what they would have got.

A few restarts in the suite, and a standby that takes over at last; `make restarts` has a hundred restarts
(ATOLL_TEST_RESTARTS), at random moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import atoll
from atoll.cluster.settings import GRACE_SECONDS
from atoll.errors import ConnectError, StatusError
from atoll.operate.requests import request_check, request_operation
from atoll.protocol.messages import CheckReply, RemapRequest
from atoll.wire.address import parse_address
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.end_to_end.two_islands import train

RESTARTS = int(os.environ.get("ATOLL_TEST_RESTARTS", "3"))
_STEPS = 40
# On a machine that is busy with other things.
_BACK_SECONDS = 120.0
_END_SECONDS = 300.0


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, module_directory: Path) -> StandingCluster:
    journal = str(module_directory / "journal")
    return start_cluster(islands="2x1x2", journal=journal, grace_seconds=GRACE_SECONDS)


# ---- what clients do, until a file is there


def go_on(stop: str) -> Iterator[int]:
    count = 0
    while not Path(stop).exists() or count == 0:
        yield count
        count += 1


def open_session() -> int:
    return len(jax.devices())


def train_on(stop: str) -> list[list[str]]:
    return [train(_STEPS) for _ in go_on(stop)]


def compile_on(stop: str) -> list[float]:
    """A function that was never compiled before, each time; how far what it computes is from what it should be."""
    found = []
    values = np.arange(16.0).reshape(4, 4)
    for count in go_on(stop):
        factor = 1.0 + count / 1024
        made = jax.jit(lambda x, factor=factor: jnp.sum(x * factor) + factor)(values)
        found.append(abs(float(made) - (values.sum() * factor + factor)))
    return found


def move_on(stop: str) -> list[float]:
    """Adds ones on a slice that is moved meanwhile: what is lost of them, or counted twice."""
    s = atoll.make_virtual_device_set().add_slice(devices=2)
    sharding = jax.sharding.NamedSharding(s.mesh("x"), jax.sharding.PartitionSpec("x"))
    state = jax.device_put(np.zeros(8), sharding)
    add = jax.jit(lambda x, y: x + y)
    differences = []
    for count in go_on(stop):
        state = add(state, jax.device_put(np.ones(8), sharding))
        if count % 8 == 7:
            differences.append(float(jnp.max(jnp.abs(state - (count + 1)))))
    return differences


# ---- what is done to the controller


def controller(cluster: StandingCluster) -> psutil.Process:
    (found,) = (each for name, each in cluster.processes().items() if name.startswith("atoll.controller_process"))
    return found


def kill(cluster: StandingCluster) -> float:
    """Kills the controller. Returns the seconds until another one answers."""
    controller(cluster).kill()
    return answers(cluster)


def answers(cluster: StandingCluster) -> float:
    """Seconds until a controller answers at the cluster's address."""
    began = time.monotonic()
    while True:
        with contextlib.suppress(ConnectError):
            cluster.report()
            return time.monotonic() - began
        assert time.monotonic() < began + _BACK_SECONDS, f"there is no controller again\n{cluster.messages()}"
        time.sleep(0.02)


def controller_of(engine: psutil.Process) -> psutil.Process:
    (found,) = (each for each in engine.children() if "atoll.controller_process.main" in each.cmdline())
    return found


def taken_over(cluster: StandingCluster) -> float:
    """Seconds until the standby answers, which is the cluster's controller then."""
    cluster.address = cluster.standby
    return answers(cluster)


def check(cluster: StandingCluster) -> CheckReply:
    """As `atoll check`: differences that are there each of three times."""
    address = parse_address(cluster.address)
    reply = request_check(address, cluster.token)
    assert reply.contradictions == ()
    lasting = set(reply.differences)
    for _ in range(2 if lasting else 0):
        time.sleep(0.3)
        lasting &= set(request_check(address, cluster.token).differences)
    assert lasting == set()
    return reply


def remap(cluster: StandingCluster, island: int) -> None:
    """Moves what has a slice; where the controller ends meanwhile, it may be moved or not."""
    for session in cluster.report()["sessions"]:
        for each in session["slices"]:
            with contextlib.suppress(ConnectError, StatusError):
                request_operation(
                    parse_address(cluster.address),
                    cluster.token,
                    RemapRequest(session["id"], each["id"], island),
                    None,
                    5,
                )


def test_clients_of_a_controller_that_is_killed_again_and_again_lose_nothing(
    cluster: StandingCluster, start_python: StartPython, tmp_path: Path, module_directory: Path
) -> None:
    rng = random.Random(os.environ.get("ATOLL_TEST_SEED", "1"))
    stop = str(tmp_path / "stop")
    clients: dict[Any, Any] = {
        work: start_python(ATOLL_ADDRESS=cluster.address) for work in (train_on, compile_on, move_on)
    }
    undisturbed = clients[train_on].call(train, _STEPS, seconds=_END_SECONDS)
    for work, python in clients.items():
        assert python.call(open_session, seconds=_END_SECONDS) == 4  # a script that starts while nobody listens fails
        python.begin(work, stop)
    seconds = []
    for count in range(RESTARTS):
        time.sleep(rng.uniform(0.1, 2.0))
        if rng.random() < 0.5:
            remap(cluster, count % 2)
        seconds.append(kill(cluster))
        check(cluster)
        if count % 10 == 9:
            print(
                f"{count + 1} restarts; median {sorted(seconds)[len(seconds) // 2]:.2f} s, most {max(seconds):.2f} s",
                flush=True,
            )
    cluster.start_standby(module_directory / "standby")
    controller(cluster).kill()
    until_taken_over = taken_over(cluster)
    check(cluster)
    Path(stop).touch()
    trained = clients[train_on].finish(_END_SECONDS)
    assert [losses for losses in trained if losses != undisturbed] == []
    assert max(clients[compile_on].finish(_END_SECONDS)) == 0.0
    assert max(clients[move_on].finish(_END_SECONDS), default=0.0) == 0.0
    for python in clients.values():
        python.close()
    cluster.until(lambda report: not report["sessions"], 30)
    assert check(cluster).arrays == 0
    kinds = [each["kind"] for each in cluster.report()["events"]]
    assert kinds.count("lost") == 0, "no island restarts"
    print(
        f"{RESTARTS} restarts, {len(trained)} trainings; another controller answers within {max(seconds):.2f} s at "
        f"most, and a standby after {until_taken_over:.2f} s"
    )
