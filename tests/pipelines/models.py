"""Small models of plain JAX, for tests of how they are cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atoll.pipelines.boundary import stage_boundary

VOCABULARY, WIDTH, LAYERS = 11, 16, 4


def first_params(layers: int = LAYERS) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 1 + 2 * layers))
    return {
        "embedding": jax.random.normal(next(keys), (VOCABULARY, WIDTH)),
        "layers": [
            {
                "up": jax.random.normal(next(keys), (WIDTH, 4 * WIDTH)) / 8,
                "down": jax.random.normal(next(keys), (4 * WIDTH, WIDTH)) / 8,
            }
            for _ in range(layers)
        ],
    }


def first_batch(rows: int = 2) -> np.ndarray[Any, Any]:
    return (np.arange(rows * 9, dtype=np.int32).reshape(rows, 9) * 7) % VOCABULARY


def layer(params: Any, h: jax.Array) -> jax.Array:
    return h + jax.nn.gelu(h @ params["up"]) @ params["down"]


def loss(params: Any, batch: jax.Array, marked: bool = False, checkpointed: bool = False) -> jax.Array:
    """Predicts the next token; the embedding is used at both ends."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    h = params["embedding"][tokens]
    run = jax.checkpoint(layer) if checkpointed else layer
    for number, each in enumerate(params["layers"]):
        if number and marked:
            h = stage_boundary(h)
        h = run(each, h)
    logits = jax.nn.log_softmax(h @ params["embedding"].T)
    return -jnp.take_along_axis(logits, targets[..., None], -1).mean()
