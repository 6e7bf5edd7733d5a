"""(y): what a step of a pipeline costs the controller, on null devices: as a delegated run, and node by node."""

from __future__ import annotations

import time
from collections import deque

from atoll.cluster.settings import ClusterSettings
from atoll.pipelines.entries import Times
from atoll.pipelines.schedules import schedule
from atoll.session.bare import BareClient
from benchmarks.harness.benchmark import Round, Settings
from benchmarks.paper.cluster import NullCluster
from benchmarks.paper.schedules import Sizes, make_training
from benchmarks.paper.training import Training

STATIC = "atoll, delegated runs"
_STAGES, _MICRO_BATCHES = 16, 64
# Stages take less time than their hosts, so that a step takes the time of the hosts, which share a machine.
STEP_SIZES = Sizes(unit=1e-4, activation_bytes=4096)
_AHEAD = 2


def steps(settings: Settings) -> Round:
    is_delegated = settings.system == STATIC
    stages, microbatches = settings.size(_STAGES, 4), settings.size(_MICRO_BATCHES, 8)
    alone = ClusterSettings(f"{stages}x1x1").delegate_after_seconds or 0.0
    cluster = NullCluster(f"{stages}x1x1", delegate_after_seconds=alone if is_delegated else None)
    client = cluster.client()
    table = schedule("1f1b", stages, microbatches)
    groups = [[device] for device in client.devices]
    training = cluster.run(make_training(client, groups, table, Times(), STEP_SIZES))
    count = settings.size(8, 4)
    weights = cluster.run(begin(client, training))

    def measure() -> dict[str, float]:
        nonlocal weights
        before, sent, began = cluster.cpu_seconds(), cluster.controller_bytes(), time.perf_counter()
        weights = cluster.run(train(client, training, weights, count))
        seconds, after = time.perf_counter() - began, cluster.cpu_seconds()
        sent = cluster.controller_bytes() - sent
        time.sleep(seconds)
        idle = cluster.cpu_seconds()["controller"] - after["controller"]
        return {
            "controller": 1e3 * (after["controller"] - before["controller"]) / count,
            "idle": 1e3 * idle / count,
            "bytes": sent / 1e3 / count,
            "hosts": 1e3 * (after["hosts"] - before["hosts"]) / count,
            "step": 1e3 * seconds / count,
        }

    weights = cluster.run(train(client, training, weights, 1))
    time.sleep(alone)
    weights = cluster.run(train(client, training, weights, _AHEAD + 1))  # by now it is known how long gangs take
    return measure


async def begin(client: BareClient, training: Training) -> list[int]:
    """Return the first weights."""
    weights = await client.launch(training.first, (), training.weights)
    await client.wait(weights)
    return weights


async def train(client: BareClient, training: Training, weights: list[int], count: int) -> list[int]:
    """So many steps, with others in flight behind each, to the end of all gangs of the last one; the new weights."""
    losses: deque[int] = deque()

    async def end_one() -> None:
        loss = losses.popleft()
        await client.wait((loss,))
        client.release((loss,))

    for _ in range(count):
        *following, loss = await client.launch(training.step, weights, training.weights + 1)
        client.release(weights)
        weights = following
        losses.append(loss)
        if len(losses) > _AHEAD:
            await end_one()
    while losses:
        await end_one()
    await client.wait(weights)
    return weights
