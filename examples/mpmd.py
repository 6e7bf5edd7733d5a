"""Train a small transformer with Shardy's `mpmd.jit` on four islands, under one of its pipeline schedules.

    pip install jaxtyping immutabledict absl-py
    git clone https://github.com/openxla/shardy     # a revision that supports your JAX
    PYTHONPATH=shardy python examples/mpmd.py --schedule 1F1B

Each stage is a named computation on a mesh of one island. Shardy divides the step into fragments and orders them, and
Atoll runs the whole step as one launch.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "atoll")
os.environ.setdefault("ATOLL_ISLANDS", "4x1x2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

# The schedules by name, with the stages per island that they need.
SCHEDULES = {
    "GPipe": 1,
    "GPipeBut1F1BForLastMesh": 1,
    "1F1B": 1,
    "Circular": 2,
    "CircularWithReversedBackward": 2,
    "ZeroBubbleH1": 1,
    "ZeroBubbleH2ZeroTxLatency": 1,
    "ZeroBubbleH2HalfTxLatency": 1,
    "ZeroBubbleH2FullTxLatency": 1,
}
ISLANDS, MICRO_BATCHES = 4, 6
ROWS, LENGTH, WIDTH = 2, 16, 32
RATE = 0.05


def first_params(stages: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return random weights of one transformer block per stage."""
    rng = np.random.default_rng(0)
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return [
        {name: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(stages)
    ]


def batches() -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """Return the inputs and targets of all micro-batches."""
    rng = np.random.default_rng(1)
    inputs, targets = (
        [rng.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32) for _ in range(MICRO_BATCHES)] for _ in range(2)
    )
    return inputs, targets


def norm(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(params: Any, x: Any) -> Any:
    """Apply one transformer block: causal attention, then a feed-forward layer."""
    query, key, value = jnp.split(norm(x) @ params["qkv"], 3, axis=-1)
    scores = jnp.einsum("bqd,bkd->bqk", query, key) / np.sqrt(WIDTH)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    x = x + jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ value @ params["out"]
    return x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]


def train_step(params: Any, inputs: Any, targets: Any, mpmd: Any = None) -> tuple[Any, Any]:
    """Return the new weights and the loss. With `mpmd`, mark the stages and micro-batches for Shardy."""

    def loss_of(params: Any, x: Any, target: Any) -> Any:
        for number, stage in enumerate(params):
            x = (mpmd.named_computation(block, name=f"stage{number}") if mpmd else block)(stage, x)
        return jnp.mean((x - target) ** 2)

    loss, total = 0.0, None
    for number, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        grad = jax.value_and_grad(loss_of)
        part, gradients = (mpmd.call(grad, call_counter=number) if mpmd else grad)(params, x, target)
        loss = loss + part / MICRO_BATCHES
        total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
    return jax.tree.map(lambda p, g: p - RATE / MICRO_BATCHES * g, params, total), loss


def train(schedule: str, steps: int) -> list[float]:
    """Train under a schedule, and return the losses."""
    devices = jax.devices()  # starts Atoll, which also provides the modules that Shardy imports
    from shardy.integrations.python.jax import mpmd

    per_island = len(devices) // ISLANDS
    meshes = {
        f"island{i}": Mesh(np.array(devices[i * per_island : (i + 1) * per_island]), ("x",)) for i in range(ISLANDS)
    }
    stages = ISLANDS * SCHEDULES[schedule]
    options: dict[str, str | bool] = {"mpmd_pipeline_schedule": schedule}
    if schedule.startswith("ZeroBubble"):
        options["mpmd_split_bwd_fragments"] = True
    config = mpmd.make_config(
        meshes,
        {f"stage{i}": f"island{i % ISLANDS}" for i in range(stages)},
        name_to_stage_assignment={f"stage{i}": i for i in range(stages)},
        partitioning_options=options,
    )
    given = first_params(stages), *batches()
    step = mpmd.jit(lambda *arguments: train_step(*arguments, mpmd=mpmd), config, donate_argnums=(0,))
    lowered = step.lower(*given)
    compiled = lowered.compile()
    params, inputs, targets = jax.tree.map(jax.device_put, given, lowered.function_named_shardings.input_specs)
    losses = []
    for _ in range(steps):
        params, loss = compiled(params, inputs, targets)
        losses.append(loss)
    return [float(loss) for loss in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedule", choices=SCHEDULES, default="1F1B", help="Shardy's pipeline schedule (default: 1F1B)"
    )
    parser.add_argument("--steps", type=int, default=5, help="training steps (default: 5)")
    options = parser.parse_args()
    for number, loss in enumerate(train(options.schedule, options.steps)):
        print(f"step {number}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
