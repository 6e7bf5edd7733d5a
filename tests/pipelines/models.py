"""Small models in plain JAX, for tests of cutting them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atoll.pipelines.boundary import stage_boundary

VOCABULARY, WIDTH, LAYERS = 11, 16, 4


def first_params(layers: int = LAYERS) -> dict[str, Any]:
    rng = np.random.default_rng(0)  # not JAX's, which would be compiled in each process that imports a test

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape))

    return {
        "embedding": normal(VOCABULARY, WIDTH),
        "layers": [
            {"up": normal(WIDTH, 4 * WIDTH, scale=1 / 8), "down": normal(4 * WIDTH, WIDTH, scale=1 / 8)}
            for _ in range(layers)
        ],
    }


def first_batch(rows: int = 2) -> np.ndarray[Any, Any]:
    return (np.arange(rows * 9, dtype=np.int32).reshape(rows, 9) * 7) % VOCABULARY


def layer(params: Any, h: jax.Array) -> jax.Array:
    return h + jax.nn.gelu(h @ params["up"]) @ params["down"]


def loss(params: Any, batch: jax.Array, marked: bool = False, checkpointed: bool = False) -> jax.Array:
    """Predict the next token, using the embedding at both ends."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    h = params["embedding"][tokens]
    run = jax.checkpoint(layer) if checkpointed else layer
    for number, each in enumerate(params["layers"]):
        if number and marked:
            h = stage_boundary(h)
        h = run(each, h)
    logits = jax.nn.log_softmax(h @ params["embedding"].T)
    return -jnp.take_along_axis(logits, targets[..., None], -1).mean()


def first_rows(rows: int) -> np.ndarray[Any, Any]:
    """Return the batch of `loss_of_rows`."""
    return np.random.default_rng(rows).standard_normal((rows, WIDTH), np.float32)


def loss_of_rows(layers: Any, batch: jax.Array) -> jax.Array:
    """Return the mean square of what the layers make of the rows. It compiles in a part of the time of `loss`."""
    h = batch
    for each in layers:
        h = stage_boundary(h + jnp.tanh(h @ each["up"]) @ each["down"])
    return (h**2).mean()
