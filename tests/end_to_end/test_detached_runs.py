"""Test of detached runs: a script is killed after it has submitted its steps, and another one continues bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll
from atoll.data import Batches, BatchIterator
from tests.end_to_end.remote_python import RemoteError, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.end_to_end.test_arrays_between_scripts import check
from tests.thoroughness import TIMES

NAME = "run-7"
EVERY = 100  # steps between publications


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    return start_cluster(islands="2x1x2")


# ---- functions that scripts run


def _numbers(shard: atoll.data.Shard) -> list[np.ndarray]:
    generator = np.random.default_rng(7)
    return [generator.random((4, 8), np.float32)[shard.index :: shard.count] for _ in range(1000)]


def _place() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), PartitionSpec("x"))


def _first_weights(place: NamedSharding) -> jax.Array:
    return jax.device_put(np.linspace(0, 1, 64, dtype=np.float32), place)


@jax.jit
def _step(weights: jax.Array, batch: jax.Array) -> jax.Array:
    return jnp.sin(weights * 1.25 + batch.sum() * 0.01)


def _steps(tree: dict[str, jax.Array], batches: BatchIterator, steps: int, name: str) -> None:
    """Run steps, most of them without a new batch, and publish the weights with the state of the iterator."""
    weights, first, batch = tree["weights"], int(tree["step"]) + 1, tree["batch"]
    for step in range(first, first + steps):
        if step % EVERY == 1:
            batch = next(batches)
        weights = _step(weights, batch)
        if step % EVERY == 0:
            tree = {"weights": weights, "batch": batch, "step": np.int32(step), "input": batches.get_state()}
            atoll.publish(name, tree)


def begin(steps: int, name: str = NAME) -> None:
    """Start a run, and submit its first steps."""
    atoll.connect(name=name, detach=True)
    place = _place()
    tree = {"weights": _first_weights(place), "step": np.int32(0)}
    _steps(
        tree | {"batch": jax.device_put(np.zeros((4, 8), np.float32), place)},
        iter(Batches(_numbers, place)),
        steps,
        name,
    )


def attach(steps: int, name: str = NAME) -> tuple[int, int, bytes]:
    """Continue the run. Return its step before and after, and the weights."""
    atoll.connect(name=name, detach=True)
    place = _place()
    whole = NamedSharding(place.mesh, PartitionSpec())
    shardings = {"weights": place, "batch": place, "step": whole, "input": whole}
    version = atoll.subscribe(name, shardings)
    batches = iter(Batches(_numbers, place))
    batches.set_state(version.tree["input"])
    _steps(version.tree, batches, steps, name)
    last = atoll.subscribe(name, shardings, newer_than=version.number if steps else None)
    return int(version.tree["step"]), int(last.tree["step"]), np.asarray(last.tree["weights"]).tobytes()


def step_on(steps: int, progress: str = "") -> tuple[int, bytes]:
    """Run steps of an unpublished run, until the file `stop` exists. Return their number and the weights."""
    place = _place()
    weights, batches = _first_weights(place), iter(Batches(_numbers, place))
    for step in range(1, steps + 1):
        if step % EVERY == 1:
            batch = next(batches)
        weights = _step(weights, batch)
        if progress:
            jax.block_until_ready(weights)
            with open(progress, "a") as file:
                file.write(".")
            time.sleep(0.02)
            if Path(progress).with_name("stop").exists():
                break
    return step, np.asarray(weights).tobytes()


@pytest.mark.slow
def test_a_second_script_continues_a_killed_one_bit_for_bit(
    cluster: StandingCluster, start_python: StartPython
) -> None:
    first = start_python(ATOLL_ADDRESS=cluster.address)
    first.call(begin, 2 * EVERY)
    first.process.kill()
    first.close()
    second = start_python(ATOLL_ADDRESS=cluster.address)
    assert second.call(attach, EVERY) == (2 * EVERY, *second.call(step_on, 3 * EVERY))
    second.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_continues_bit_for_bit_after_its_script_was_killed(
    cluster: StandingCluster, start_python: StartPython
) -> None:
    whole = start_python(ATOLL_ADDRESS=cluster.address)
    whole.call(begin, 1100, "reference")
    whole.close()
    reader = start_python(ATOLL_ADDRESS=cluster.address)
    reference = reader.call(attach, 0, "reference")
    reader.close()
    for _ in range(TIMES):
        first = start_python(ATOLL_ADDRESS=cluster.address)
        first.call(begin, 1000)
        first.process.kill()
        second = start_python(ATOLL_ADDRESS=cluster.address)
        assert second.call(attach, 100) == (1000, *reference[1:])
        first.close()
        second.close()
    assert check(cluster, "") == []


def connect(name: str, wait: float) -> None:
    atoll.connect(name=name, detach=True, wait=wait)


@pytest.mark.slow
def test_a_name_has_one_script_at_a_time(cluster: StandingCluster, start_python: StartPython) -> None:
    first, second = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2))
    first.call(connect, "run-8", 0.0)
    with pytest.raises(RemoteError, match=r"ConnectError: run-8 is attached to session \d+"):
        second.call(connect, "run-8", 0.0)
    first.close()
    second.call(connect, "run-8", 60.0)
    second.close()
