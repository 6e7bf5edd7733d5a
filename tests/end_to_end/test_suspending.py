"""Tests that sessions of real scripts are suspended and resumed while they run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll
from atoll.errors import StatusError
from atoll.operate.operator_requests import request_operation
from atoll.protocol import messages as m
from atoll.wire.address import parse_address
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, module_directory: Path) -> StandingCluster:
    """Start two islands of one host, each with two devices of slightly more than 16 MiB."""
    return start_cluster(
        islands="2x1x2", device_memory=16 * MIB + (1 << 16), suspend_directory=str(module_directory / "spilled")
    )


@pytest.fixture(scope="module")
def pythons(cluster: StandingCluster, start_python: StartPython) -> list[RemotePython]:
    return [start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2)]


def ask(cluster: StandingCluster, request: Any) -> str:
    return request_operation(parse_address(cluster.address), "", request, seconds=60.0)


def session_of(cluster: StandingCluster, python: RemotePython) -> int:
    (found,) = [each["id"] for each in cluster.report()["sessions"] if each["pid"] == python.pid]
    return int(found)


def used(cluster: StandingCluster) -> list[int]:
    islands = cluster.report()["islands"]
    return [sum(each["used_bytes"] for host in island["hosts"] for each in host["devices"]) for island in islands]


# ---- training


def train(progress: str, steps: int, first: int = 0) -> tuple[list[str], list[str], bytes]:
    """Train on two devices, from number `first`, for this many steps, or until the file `stop` exists.

    Return the losses, the losses that a callback received, and the parameters.
    """
    mesh = Mesh(np.array(jax.devices()[first : first + 2]), ("d",))
    rows, whole = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
    key = jax.random.key(0)
    weights = jax.device_put(jax.random.normal(key, (32, 32)), whole)
    view = weights[0]
    seen: list[str] = []

    def loss_of(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w) - 1) ** 2)

    def update(w: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(w, x)
        jax.debug.callback(lambda each: seen.append(float(each).hex()), loss)
        return w - 0.1 * gradient, loss

    step = jax.jit(update, donate_argnums=0)
    scaled = jax.jit(lambda a, b: a * 0.5 + b)

    @atoll.program
    def average(a: Any, b: Any) -> Any:
        return scaled(scaled(a, b), b)

    mean = jax.device_put(np.zeros((32, 32), np.float32), rows)
    losses: list[str] = []
    stop = Path(progress).with_name("stop")
    while len(losses) < steps and not stop.exists():
        x = jax.device_put(jax.random.normal(jax.random.fold_in(key, len(losses)), (64, 32)), rows)
        weights, loss = step(weights, x)
        mean = average(mean, jax.device_put(weights, rows))
        losses.append(float(loss).hex())
        with open(progress, "a") as file:
            file.write(".")
    jax.effects_barrier()
    return losses, seen, b"".join(np.asarray(each).tobytes() for each in (weights, mean, view))


def steps_at(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def until_step(path: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while steps_at(path) < step:
        assert time.monotonic() < deadline, f"the script is at step {steps_at(path)}"
        time.sleep(0.01)


def test_a_suspended_training_gives_what_an_undisturbed_one_gives(
    cluster: StandingCluster, pythons: list[RemotePython], tmp_path: Path, module_directory: Path
) -> None:
    python, other = pythons
    progress = tmp_path / "progress"
    python.begin(train, str(progress), 100_000)
    until_step(progress, 3)
    session = session_of(cluster, python)
    # To memory: its devices are empty, and its script waits until it is resumed on the same island.
    assert ask(cluster, m.SuspendRequest(session)) == f"session {session} is suspended in memory"
    assert used(cluster) == [0, 0]
    at = steps_at(progress)
    (row,) = [each for each in cluster.report()["sessions"] if each["id"] == session]
    assert (row["state"], row["spilled_bytes"] > 0) == ("suspended in memory", True)
    time.sleep(0.2)
    assert steps_at(progress) <= at + 1, "what it computed before, and had yet to write"
    assert ask(cluster, m.ResumeRequest(session)) == f"session {session} continues on island 0"
    until_step(progress, at + 3)
    # To disk, and resumed on another island.
    ask(cluster, m.SuspendRequest(session, to_disk=True))
    (directory,) = (module_directory / "spilled").iterdir()
    assert (directory / "host-0.json").exists()
    assert ask(cluster, m.ResumeRequest(session, (1,))) == f"session {session} continues on island 1"
    before, after = used(cluster)
    assert (before, after > 0) == (0, True)
    at = steps_at(progress)
    until_step(progress, at + 3)
    (tmp_path / "stop").touch()
    disturbed = python.finish()
    assert ask(cluster, m.SuspendRequest(session)).endswith("in memory"), "a script that asks nothing is suspended, too"
    ask(cluster, m.ResumeRequest(session))
    assert not directory.exists()
    (tmp_path / "again").mkdir()
    assert disturbed == other.call(train, str(tmp_path / "again" / "progress"), len(disturbed[0]))


def test_a_suspended_training_over_two_islands_gives_what_an_undisturbed_one_gives(
    cluster: StandingCluster, start_python: StartPython, tmp_path: Path
) -> None:
    python, other = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2))
    progress = tmp_path / "progress"
    python.begin(train, str(progress), 100_000, 1)
    until_step(progress, 3)
    session = session_of(cluster, python)
    # In memory and on disk, on the same islands and with the islands exchanged.
    for to_disk, islands in ((False, ()), (True, (1, 0))):
        ask(cluster, m.SuspendRequest(session, to_disk))
        assert used(cluster) == [0, 0]
        ask(cluster, m.ResumeRequest(session, islands))
        assert all(used(cluster))
        until_step(progress, steps_at(progress) + 3)
    (tmp_path / "stop").touch()
    disturbed = python.finish()
    (tmp_path / "again").mkdir()
    assert disturbed == other.call(train, str(tmp_path / "again" / "progress"), len(disturbed[0]), 1)
    for each in (python, other):
        each.close()


# ---- more sessions than the devices can hold


def hold(seed: int) -> None:
    """Occupy all 16 MiB of each device for as long as the script runs."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    contents = np.random.default_rng(seed).integers(0, 1 << 62, (2, 2 * MIB))
    globals()["held"] = jax.block_until_ready(jax.device_put(contents, sharding))
    globals()["contents"] = contents


def turn() -> bool:
    """Run one computation on all of the array, in place."""
    held = jax.jit(lambda a: a + 1, donate_argnums=0)(globals()["held"])
    globals()["contents"] += 1
    globals()["held"] = held
    return np.array_equal(np.asarray(held), globals()["contents"])


def test_two_sessions_with_more_than_the_devices_have_take_turns(
    cluster: StandingCluster, pythons: list[RemotePython]
) -> None:
    sessions = []
    for seed, python in enumerate(pythons):
        python.call(hold, seed)
        sessions.append(session_of(cluster, python))
        ask(cluster, m.SuspendRequest(sessions[-1], to_disk=seed == 1))
    for _ in range(2):
        for session, python in zip(sessions, pythons, strict=True):
            ask(cluster, m.ResumeRequest(session, (0,)))
            assert python.call(turn)
            ask(cluster, m.SuspendRequest(session))
    ask(cluster, m.ResumeRequest(sessions[0], (0,)))
    with pytest.raises(
        StatusError, match=rf"waits for 16.0 MiB on device 0.*the rest is held by session {sessions[0]}"
    ):
        ask(cluster, m.ResumeRequest(sessions[1], (0,)))
    pythons[0].close()
    assert "continues" in ask(cluster, m.ResumeRequest(sessions[1], (0,), 30.0))
    assert pythons[1].call(turn)
