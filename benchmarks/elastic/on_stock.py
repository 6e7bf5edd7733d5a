"""The side of stock JAX: the same steps over so many devices of one process, with checkpoints by Orbax.

Killed, it is started again from its last checkpoint; asked to end (SIGTERM), it saves one first.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.elastic import sleeping, work


def main() -> None:
    sleeping.register()
    directory, count, megabytes = sys.argv[1], work.argument(2), work.argument(3)
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def mean_gradients(state: Any, part: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.pmean(leaf, "data"), work.gradients(state, part))

    over_devices = jax.shard_map(
        mean_gradients,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    def step(state: Any, batch: Any) -> Any:
        gradient, loss = over_devices(state, batch)
        return work.update(state, gradient), loss

    jitted = jax.jit(step, donate_argnums=0, out_shardings=whole)
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2))
    state, number = work.first_state(megabytes), 0
    if manager.latest_step() is not None:
        number = manager.latest_step()
        state = manager.restore(number, args=ocp.args.StandardRestore(state))
    state = jax.device_put(state, whole)
    under_way: deque[tuple[int, Any]] = deque()
    while not ending:
        state, loss = jitted(state, jax.device_put(work.batch(number), rows))
        under_way.append((number, loss))
        number += 1
        if number % work.EVERY == 0:
            manager.save(number, args=ocp.args.StandardSave(state))
        if len(under_way) >= work.AHEAD:
            done, loss = under_way.popleft()
            work.report("step", step=done, loss=float(loss), devices=count)
    jax.block_until_ready(state)
    if number % work.EVERY:
        manager.save(number, args=ocp.args.StandardSave(state), force=True)
    manager.wait_until_finished()
    manager.close()


if __name__ == "__main__":
    main()
