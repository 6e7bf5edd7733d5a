"""Training as a client sees it: one program per step, which takes weights and returns the next ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from atoll.session.bare import BareClient
from atoll.virtual.cluster import VirtualCluster

# Steps that the client launches ahead of the one that it waits for.
_AHEAD = 2
# Until the scheduler knows how long gangs take: those of the steps launched first are thought to be short.
WARM_UP = 1 + _AHEAD + 1


@dataclass(frozen=True)
class Training:
    """Registered programs: `first` makes the `weights` arrays, and `step` takes them and gives new ones and a loss."""

    first: int
    step: int
    weights: int


async def read_step_seconds(cluster: VirtualCluster, client: BareClient, training: Training, steps: int) -> float:
    """Of a step whose loss the client reads before it launches the next: nothing hides what the control plane takes."""
    weights = await client.launch(training.first, (), training.weights)
    await client.wait(weights)
    started = cluster.now()
    for _ in range(steps):
        *following, loss = await client.launch(training.step, weights, training.weights + 1)
        client.release(weights)
        await client.wait((loss,))
        client.release((loss,))
        weights = following
    seconds = (cluster.now() - started) / steps
    client.release(weights)
    return seconds


async def step_seconds(cluster: VirtualCluster, client: BareClient, training: Training, steps: int) -> float:
    """Return the seconds per step after a warm-up, with further steps in flight."""
    ends = []
    losses: deque[int] = deque()

    async def end_one() -> None:
        loss = losses.popleft()
        await client.wait((loss,))
        client.release((loss,))
        ends.append(cluster.now())

    weights = await client.launch(training.first, (), training.weights)
    for _ in range(WARM_UP + steps):
        *following, loss = await client.launch(training.step, weights, training.weights + 1)
        client.release(weights)
        weights = following
        losses.append(loss)
        if len(losses) > _AHEAD:
            await end_one()
    while losses:
        await end_one()
    client.release(weights)
    return (ends[-1] - ends[WARM_UP - 1]) / steps
