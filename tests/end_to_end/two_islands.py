"""Functions for children on two islands. Children import this module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def from_island_to_island() -> tuple[int, float]:
    """Send bytes from the client to a host, from host to host, and back."""
    first, second = (next(d for d in jax.devices() if d.slice_index == island) for island in (0, 1))
    there = jax.device_put(np.arange(3_000_000, dtype=np.float32), first)
    moved = jax.device_put(jax.jit(lambda x: x + 1)(there), second)
    assert np.array_equal(np.asarray(moved), np.arange(3_000_000, dtype=np.float32) + 1)
    return len(jax.devices()), float(jnp.sum(moved[:10]))


def train(steps: int) -> list[str]:
    """Train a model in two parts, one on each island. Return the exact losses."""
    first, second = (next(d for d in jax.devices() if d.slice_index == island) for island in (0, 1))
    forward = jax.jit(lambda w, x: jnp.tanh(x @ w))
    backward = jax.jit(jax.value_and_grad(lambda v, h: jnp.mean(jnp.sin(h @ v) ** 2)))
    w = jax.device_put(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), first)
    v = jax.device_put(np.linspace(1, -1, 64, dtype=np.float32).reshape(8, 8), second)
    losses = []
    for step in range(steps):
        x = jax.device_put(np.full((4, 8), step % 7, dtype=np.float32), first)
        loss, gradient = backward(v, jax.device_put(forward(w, x), second))
        v = v - 0.1 * gradient
        losses.append(loss)
    return [float(loss).hex() for loss in losses]
