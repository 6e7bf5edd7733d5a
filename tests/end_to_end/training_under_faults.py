"""User code of a training that continues after failures."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

import atoll
from atoll.elastic.islands import is_loss

_EVERY = 5  # number of steps between copies
_MAX_ATTEMPTS = 400  # consecutive errors: no island is left, and there will be none
_WIDTH = 64


def batch(step: int) -> Any:
    return np.random.default_rng(step).normal(size=(16, _WIDTH)).astype(np.float32)


@jax.jit
def update(weights: Any, rows: Any) -> tuple[Any, Any]:
    loss, gradient = jax.value_and_grad(lambda weights: jnp.mean(jnp.tanh(rows @ weights) ** 2))(weights)
    return weights - 0.1 * gradient, loss


def begin(checkpoint: tuple[Any, int]) -> tuple[Any, int, Any]:
    """Load a checkpoint.

    Return its weights on a device, their step, and the replica that keeps a copy on another island.
    """
    host, step = checkpoint
    weights = jax.device_put(host, jax.devices()[0])
    return weights, step, atoll.replicate(weights, step=step, every=_EVERY)


def train_through(steps: int, pause: float) -> tuple[list[str], list[float]]:
    """Train for a number of steps. Return the exact losses, and the time at which each was first known.

    Steps that are computed again must have the same losses. A failed island costs the steps since the last copy on
    another island. A lost proxy costs the steps since the last checkpoint, and so do both islands if the second one
    fails before there is a new copy.
    """
    checkpoint = np.eye(_WIDTH, dtype=np.float32), 0
    weights, step, replica = begin(checkpoint)
    losses: dict[int, str] = {}
    known: list[float] = []
    attempts, remedy = 0, ""
    while step < steps:
        try:
            if remedy == "recover":
                weights, step = atoll.recover(replica)
                replica.restart(weights, step)
            elif remedy:
                if remedy == "reconnect":
                    jax.extend.backend.clear_backends()
                weights, step, replica = begin(checkpoint)
            remedy = ""
            following, loss = update(weights, jax.device_put(batch(step), weights.sharding))
            found = float(loss).hex()
            if step % _EVERY == 0:
                checkpoint = np.asarray(weights), step
        except (jax.errors.JaxRuntimeError, atoll.RecoveryError) as error:
            attempts += 1
            if attempts > _MAX_ATTEMPTS:
                raise
            remedy = remedy_for(error)
            time.sleep(0.05)
            continue
        attempts = 0
        if step not in losses:
            known.append(time.monotonic())
        assert losses.setdefault(step, found) == found, f"step {step}, computed again, gives another loss"
        weights = following
        step += 1
        replica.refresh(weights, step)
        time.sleep(pause)
    return [losses[step] for step in range(steps)], known


def remedy_for(error: Exception) -> str:
    if isinstance(error, atoll.RecoveryError):
        return "restart"
    if "IFRT proxy server was terminated" in str(error):
        return "reconnect"
    if is_loss(error):
        return "recover"
    raise error
