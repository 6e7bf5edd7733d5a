"""Tunix's weight sync over Atoll: a trainer and two rollout workers on other devices, in rounds of Tunix's coordinator.

    JAX_PLATFORMS=atoll ATOLL_ISLANDS=2x1x4 python examples/tunix_weight_sync.py

Needs Tunix from its repository. The workers only have what Tunix's coordinator calls. In the last round, one worker
cannot read the weights, so all workers continue to serve the former ones.
"""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from tunix.experimental.common.datatypes import WorkerInfo
from tunix.experimental.orchestrator.weight_sync_coordinator import WeightSyncCoordinator, WeightSyncError
from tunix.experimental.orchestrator.worker_registry import WorkerRegistry

from atoll.tunix import AtollHandler, WeightDestination, WeightSource

ROUNDS = 3


def params_of(step: int, sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """Return parameters that show by their values of which step they are."""
    values = {"embed": np.full((64, 32), step, np.float32), "up": np.full((32, 128), step + 0.5, np.float32)}
    return jax.device_put(values, sharding)


class Trainer(WeightSource):
    def __init__(self) -> None:
        mesh = Mesh(np.array([device for device in jax.devices() if device.slice_index == 0]), "x")
        self.state = params_of(0, NamedSharding(mesh, PartitionSpec("x")))
        self.learn = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
        super().__init__("policy", lambda: self.state)

    def info(self) -> WorkerInfo:
        return WorkerInfo(worker_id="trainer", roles=frozenset({"trainer"}))

    def step(self) -> None:
        self.state = self.learn(self.state)


class Rollout(WeightDestination):
    def __init__(self, number: int) -> None:
        devices = [device for device in jax.devices() if device.slice_index == 1]
        self.number, self.fails, self.serves = number, False, True
        super().__init__(params_of(0, SingleDeviceSharding(devices[number])), pause=self.stop, resume=self.start)

    def info(self) -> WorkerInfo:
        return WorkerInfo(worker_id=f"rollout-{self.number}", roles=frozenset({"rollout"}))

    async def stop(self) -> None:
        self.serves = False

    async def start(self) -> None:
        self.serves = True

    async def weight_sync(self, sync_request=None, **kwargs) -> None:
        if self.fails:
            raise RuntimeError("this worker has no memory left")
        await super().weight_sync(sync_request, **kwargs)

    def value(self) -> float:
        """Return the step of the parameters that this worker serves. All arrays must be of the same step."""
        (step,) = {float(jnp.max(self.params["embed"])), float(jnp.min(self.params["up"])) - 0.5}
        return step


async def main() -> None:
    registry, trainer, rollouts = WorkerRegistry(), Trainer(), [Rollout(number) for number in range(2)]
    for worker in (trainer, *rollouts):
        registry.register(worker)
    coordinator = WeightSyncCoordinator(registry, AtollHandler())
    for step in range(1, ROUNDS + 1):
        trainer.step()
        result = await coordinator.sync(policy_version=step)
        print(f"step {step}: {result.state.value}, workers serve {[each.value() for each in rollouts]}")
    trainer.step()
    rollouts[1].fails = True
    try:
        await coordinator.sync(policy_version=ROUNDS + 1)
    except WeightSyncError as error:
        served = [each.value() for each in rollouts if each.serves]
        print(f"step {ROUNDS + 1}: {error.result.state.value}, workers serve {served}")


if __name__ == "__main__":
    asyncio.run(main())
