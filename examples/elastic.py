"""Train a next-byte model on all available islands.

    python examples/elastic.py --islands 3       # starts a cluster of three islands, and ends it
    JAX_PLATFORMS=atoll ATOLL_ADDRESS=... python examples/elastic.py --forever

While it trains, end a worker (`kill -9`, with its pid of `atoll status --json`). The training continues with the
remaining islands from its last copy, and uses the island again when it returns. The losses are those of an
uninterrupted run, except for the order in which the gradients of islands are added.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import atoll

BYTE_VALUES = 256
WIDTH, SEQ, ROWS = 64, 32, 24  # a batch has rows enough for 1, 2, 3 or 4 islands of 1 or 2 devices
CORPUS = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8).astype(np.int32)

optimizer = optax.adam(3e-3)


def first_state() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "embed": 0.1 * jax.random.normal(keys[0], (BYTE_VALUES, WIDTH), jnp.float32),
        "mix": 0.05 * jax.random.normal(keys[1], (2 * WIDTH, WIDTH), jnp.float32),
        "predict": 0.05 * jax.random.normal(keys[2], (WIDTH, BYTE_VALUES), jnp.float32),
    }
    return {"params": params, "moments": optimizer.init(params)}


def loss_of(params: dict[str, jax.Array], windows: jax.Array) -> jax.Array:
    bytes_ = params["embed"][windows[:, :-1]]
    before = jnp.cumsum(bytes_, axis=1) / jnp.arange(1, bytes_.shape[1] + 1)[:, None]
    hidden = jax.nn.gelu(jnp.concatenate([bytes_, before], axis=-1) @ params["mix"])
    logits = hidden @ params["predict"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def gradients(state: dict[str, Any], windows: jax.Array) -> tuple[Any, jax.Array]:
    """On one island: the gradients and the loss, as means over its rows."""
    loss, gradient = jax.value_and_grad(loss_of)(state["params"], windows)
    return gradient, loss


def update(state: dict[str, Any], gradient: Any) -> dict[str, Any]:
    updates, moments = optimizer.update(gradient, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}


def batch(step: int) -> np.ndarray:
    """Return the batch of a step, which depends only on the number, so that a repeated step gets the same batch."""
    starts = np.random.default_rng(step).integers(0, len(CORPUS) - SEQ - 1, ROWS)
    return np.stack([CORPUS[start : start + SEQ + 1] for start in starts])


def train(steps: int, every: int) -> Any:
    """The run: an iterable of each step's number and loss."""
    training = atoll.elastic.data_parallel(gradients, update)
    return atoll.elastic.run(training, first_state(), batch, steps=steps, every=every)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on all islands that work.")
    parser.add_argument("--islands", type=int, default=3, help="of the cluster that it starts (default: 3)")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    parser.add_argument("--forever", action="store_true", help="until it is interrupted")
    parser.add_argument("--every", type=int, default=10, help="steps between two copies of the state (default: 10)")
    parser.add_argument("--losses-out", type=Path, help="where to write the losses, as JSON")
    options = parser.parse_args()
    losses: list[float] = []
    with atoll.connect(islands=f"{options.islands}x1x1"):  # or the cluster of ATOLL_ADDRESS
        run = train(1 << 40 if options.forever else options.steps, options.every)
        seen = 0
        for step, loss in run:
            losses.append(float(loss))
            for change in run.changes[seen:]:
                islands = ", ".join(map(str, change.islands))
                print(
                    f"step {change.step} ({change.reason}): trains on island{'s' if len(change.islands) > 1 else ''} "
                    f"{islands}; no step for {change.seconds:.2f} s; steps repeated: {change.repeated}",
                    flush=True,
                )
            seen = len(run.changes)
            if step % 50 == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    if options.losses_out is not None:
        options.losses_out.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
