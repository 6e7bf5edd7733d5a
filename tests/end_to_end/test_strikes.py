"""A training under strikes: the controller, with and without a standby, and workers are killed, again and again.

Its losses are bit for bit those of an undisturbed one. `make restarts` runs 500 steps with a strike every 10 s
(ATOLL_TEST_STRIKE_STEPS, ATOLL_TEST_STRIKE_SECONDS), and prints each interruption; the suite has no time for it.
"""

from __future__ import annotations

import itertools
import os
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
from atoll.elastic.islands import is_loss
from tests.end_to_end.lost_controller import answers, controller, controller_of, nothing_left, taken_over
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

STEPS = int(os.environ.get("ATOLL_TEST_STRIKE_STEPS", "0"))
SECONDS = float(os.environ.get("ATOLL_TEST_STRIKE_SECONDS", "4"))
_PAUSE = 0.25  # between steps: those of a model that is larger than a test's
_EVERY = 5  # steps from copy to copy
_MOST_ATTEMPTS = 400  # one after the other: there is no island again, and there will be none
_END_SECONDS = 600.0
_READY_SECONDS = 120.0
_WIDTH = 64


# ---- what the user does


def batch(step: int) -> Any:
    return np.random.default_rng(step).normal(size=(16, _WIDTH)).astype(np.float32)


@jax.jit
def update(weights: Any, rows: Any) -> tuple[Any, Any]:
    loss, gradient = jax.value_and_grad(lambda weights: jnp.mean(jnp.tanh(rows @ weights) ** 2))(weights)
    return weights - 0.1 * gradient, loss


def train_through(steps: int, pause: float) -> tuple[list[str], list[float]]:
    """The losses to the last bit, and when each was known first. What is computed again has to be the same again."""
    weights = jax.device_put(np.eye(_WIDTH, dtype=np.float32), jax.devices()[0])
    replica = atoll.replicate(weights, every=_EVERY)
    losses: dict[int, str] = {}
    known: list[float] = []
    step, is_lost, attempts = 0, False, 0
    while step < steps:
        try:
            if is_lost:
                weights, step = atoll.recover(replica)
                replica.restart(weights, step)
                is_lost = False
            following, loss = update(weights, jax.device_put(batch(step), weights.sharding))
            found = float(loss).hex()
        except jax.errors.JaxRuntimeError as error:
            attempts += 1
            if not is_loss(error) or attempts > _MOST_ATTEMPTS:
                raise
            is_lost = True
            time.sleep(0.05)
            continue
        attempts = 0
        if step not in losses:
            known.append(time.monotonic())
        assert losses.setdefault(step, found) == found, f"step {step}, computed again, gives another loss"
        weights = following
        step += 1
        replica.refresh(weights, step)
        time.sleep(pause)
    return [losses[step] for step in range(steps)], known


# ---- what is done to the cluster


class Strikes:
    """Kills parts of a cluster in turn."""

    def __init__(self, cluster: StandingCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._present = controller(cluster)
        self._count = 0

    def kinds(self) -> Iterator[tuple[str, Any]]:
        return itertools.cycle(
            [
                ("controller", self.controller),
                ("worker of island 0", lambda: self.worker(0)),
                ("controller with a standby", self.controller_with_standby),
                ("worker of island 1", lambda: self.worker(1)),
            ]
        )

    def controller(self) -> float:
        struck = time.monotonic()
        engine = self._present.parent()
        assert engine is not None
        self._present.kill()
        answers(self._cluster)
        self._present = controller_of(engine)
        return struck

    def controller_with_standby(self) -> float:
        self._count += 1
        engine = self._cluster.start_standby(self._folder / f"standby-{self._count}")
        struck = time.monotonic()
        self._present.kill()
        taken_over(self._cluster)
        self._present = controller_of(engine)
        return struck

    def worker(self, island: int) -> float:
        struck = time.monotonic()
        psutil.Process(self._pid_of(island)).kill()
        return struck

    def _pid_of(self, island: int) -> int:
        report = self._cluster.until(
            lambda report: all(each["state"] == "ready" for each in report["islands"]), _READY_SECONDS
        )
        return int(report["islands"][island]["hosts"][0]["pid"])


def interruption(struck: float, known: list[float]) -> float:
    """The longest time between two steps from just before a strike to the next one, beyond that between any two."""
    gaps = [
        after - before
        for before, after in itertools.pairwise(known)
        if after > struck and before < struck + SECONDS / 2
    ]
    return max(gaps, default=0.0) - _PAUSE


@pytest.mark.skipif(not STEPS, reason="make restarts")
def test_a_training_under_strikes_has_the_losses_of_an_undisturbed_one(
    start_cluster: StartCluster, start_python: StartPython, module_directory: Path
) -> None:
    journal = str(module_directory / "journal")
    cluster = start_cluster(islands="2x1x1", journal=journal, grace_seconds=GRACE_SECONDS)
    python = start_python(ATOLL_ADDRESS=cluster.address)
    undisturbed, _ = python.call(train_through, STEPS, 0.0, seconds=_END_SECONDS)
    strikes = Strikes(cluster, module_directory)
    began = time.monotonic()
    python.begin(train_through, STEPS, _PAUSE)
    struck: list[tuple[str, float]] = []
    for count, (name, strike) in enumerate(strikes.kinds(), 1):
        due = began + count * SECONDS
        if due > began + STEPS * _PAUSE:
            break
        time.sleep(max(0.0, due - time.monotonic()))
        struck.append((name, strike()))
    losses, known = python.finish(_END_SECONDS)
    assert losses == undisturbed
    for name, when in struck:
        print(f"{when - began:6.1f} s  {name:26} {interruption(when, known):5.2f} s")
    print(f"{STEPS} steps in {time.monotonic() - began:.0f} s, {len(struck)} strikes: the losses of an undisturbed run")
    python.close()
    nothing_left(cluster)
