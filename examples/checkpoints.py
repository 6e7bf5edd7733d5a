"""Train with Orbax checkpoints that the devices' hosts write.

    JAX_PLATFORMS=atoll ATOLL_ISLANDS=1x2x2 python examples/checkpoints.py --directory /tmp/run

You can end the script at any time and run the same command again. It then prints the losses of an uninterrupted run,
bit for bit. Orbax is unmodified: its handlers for Pathways send the work to Python processes beside the devices
(colocated Python). Checkpoints do not pass through this process, which continues to train meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH, BATCH = 64, 32

MODEL = 1 if jax.device_count() % 2 else 2  # over so many devices weights are cut, and batches over the others

mesh = Mesh(np.array(jax.devices()).reshape(-1, MODEL), ("data", "model"))
optimizer = optax.adam(1e-2)

State = dict[str, Any]


def sharding(*spec: str | None) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*spec))


def first_state() -> State:
    keys = jax.random.split(jax.random.key(0), 2)
    weights = {
        "up": jax.random.normal(keys[0], (WIDTH, 2 * WIDTH)) / 8,
        "down": jax.random.normal(keys[1], (2 * WIDTH, WIDTH)) / 8,
    }
    return {"weights": weights, "moments": optimizer.init(weights), "step": jnp.int32(0)}


def placed(path: Any, leaf: Any) -> NamedSharding:
    """Columns of `up` and rows of `down` over the axis `model`; the optimizer's moments as their weights."""
    name = jax.tree_util.keystr(path)
    if leaf.ndim < 2:
        return sharding()
    return sharding(None, "model") if "up" in name else sharding("model", None)


def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
    def loss_of(weights: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch @ weights["up"]) @ weights["down"] - jnp.sin(batch)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    updates, moments = optimizer.update(gradients, state["moments"])
    weights = optax.apply_updates(state["weights"], updates)
    return {"weights": weights, "moments": moments, "step": state["step"] + 1}, loss


def batch_of(number: int) -> jax.Array:
    """Return the batch of a step, which depends only on the step's number."""
    return jax.device_put(
        np.random.default_rng(number).normal(size=(BATCH, WIDTH)).astype(np.float32), sharding("data")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with checkpoints that the devices' hosts write.")
    parser.add_argument("--directory", type=Path, required=True, help="for the checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    options = parser.parse_args()

    shapes = jax.eval_shape(first_state)
    shardings = jax.tree_util.tree_map_with_path(placed, shapes)
    train = jax.jit(step, out_shardings=(shardings, sharding()))

    # From here on, whatever Orbax saves or restores of jax.Array goes by way of the hosts.
    ocp.pathways.register_type_handlers(checkpointing_impl=ocp.pathways.CheckpointingImpl.COLOCATED_PYTHON)
    every = ocp.CheckpointManagerOptions(save_interval_steps=options.every, max_to_keep=2)
    with ocp.CheckpointManager(options.directory.resolve(), options=every) as manager:
        last = manager.latest_step()
        if last is None:
            state = jax.jit(first_state, out_shardings=shardings)()
        else:
            wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
            state = manager.restore(last, args=ocp.args.StandardRestore(wanted))
            print(f"restored step {last}", flush=True)
        for number in range(int(state["step"]), options.steps):
            state, loss = train(state, batch_of(number))
            manager.save(number + 1, args=ocp.args.StandardSave(state))
            print(f"step {number} loss {float(loss).hex()}", flush=True)
    print("done")


if __name__ == "__main__":
    main()
