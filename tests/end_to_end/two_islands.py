"""A function for children on two islands; in a module of its own, since they import it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def from_island_to_island() -> tuple[int, float]:
    """Bytes go from the client to a host, from host to host, and back."""
    first, second = (next(d for d in jax.devices() if d.slice_index == island) for island in (0, 1))
    there = jax.device_put(np.arange(3_000_000, dtype=np.float32), first)
    moved = jax.device_put(jax.jit(lambda x: x + 1)(there), second)
    assert np.array_equal(np.asarray(moved), np.arange(3_000_000, dtype=np.float32) + 1)
    return len(jax.devices()), float(jnp.sum(moved[:10]))
