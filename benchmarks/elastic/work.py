"""The training of the benchmark `elastic`: its steps sleep, so that the CPUs of one machine do not decide."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.elastic import sleeping

ROWS = 12  # of a batch: cut evenly among 4, 3 and 2 islands
ROW_SECONDS = 0.04  # that a device takes for a row
WIDTH = 64
EVERY = 20  # steps between two copies, or two checkpoints
AHEAD = 2


def first_state(megabytes: int) -> dict[str, Any]:
    """Return the weights, and the other state to copy."""
    weights = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    return {"weights": weights, "ballast": np.zeros(megabytes * 250_000, np.float32)}


def batch(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)


def gradients(state: dict[str, Any], rows: jax.Array) -> tuple[Any, jax.Array]:
    """Of some rows, on one device, which takes as long as they are many."""
    loss, gradient = jax.value_and_grad(lambda weights: jnp.mean(jnp.tanh(rows @ weights) ** 2))(state["weights"])
    return gradient, sleeping.after(loss, rows.shape[0] * ROW_SECONDS)


def update(state: dict[str, Any], gradient: Any) -> dict[str, Any]:
    return {"weights": state["weights"] - 0.1 * gradient, "ballast": state["ballast"]}


def report(what: str, **fields: Any) -> None:
    """A line for the driver."""
    print(json.dumps({"what": what, "at": time.time(), **fields}), flush=True)


def argument(position: int) -> int:
    return int(sys.argv[position])
