"""The function of JAX through which contents of this process become arrays, for patches that make some of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from atoll.client.client_caches import client_cache
from atoll.client.jax_patches.patch import Replacement
from atoll.ir.types import REPLICATED, Replicated, Tiled

_MAX_TILINGS = 512

# `(aval, sharding, shards, devices, committed)`; returns None if JAX itself has to make the array.
Make = Callable[[Any, Any, Sequence[Any], Sequence[Any], bool], Any]


def made_first_by(make: Make) -> Replacement:
    """Return the replacement that calls `make` for each array on devices, and JAX if that returns None."""

    def putting(send: Callable[..., Any]) -> Callable[..., Any]:
        def batched_device_put(
            aval: Any,
            sharding: Any,
            xs: Sequence[Any],
            devices: Sequence[Any],
            committed: bool = True,
            *others: Any,
            **options: Any,
        ) -> Any:
            array = make(aval, sharding, xs, devices, committed) if len(devices) else None
            return send(aval, sharding, xs, devices, committed, *others, **options) if array is None else array

        return batched_device_put

    return Replacement(
        "jax._src.interpreters.pxla",
        "batched_device_put",
        putting,
        ("aval", "sharding", "xs", "devices", "committed"),
    )


def whole_array(
    aval: Any, sharding: Any, xs: Sequence[Any], devices: Sequence[Any], limit: int
) -> tuple[np.ndarray[Any, Any] | np.generic, Replicated | Tiled] | None:
    """Return the array of which `xs` are the shards on `devices`, and its tiling.

    If each device has the whole array, it is `xs[0]`, and otherwise a copy. Return None if it has more than `limit`
    bytes, or if these shards are not those of one NumPy array of the type `aval`.
    """
    first = xs[0]
    if not isinstance(first, np.ndarray | np.generic) or first.dtype != aval.dtype or first.nbytes > limit:
        return None
    if len(devices) == 1 or sharding.is_fully_replicated:
        return None if any([x is not first for x in xs]) else (first, REPLICATED)
    tiling = _tiling(sharding, len(aval.shape))
    if tiling is None or math.prod(aval.shape) * aval.dtype.itemsize > limit:
        return None
    indices = sharding.devices_indices_map(aval.shape)
    if len(indices) != len(devices):
        return None
    whole = np.empty(aval.shape, aval.dtype)
    for x, device in zip(xs, devices, strict=True):
        tile = whole[indices[device]]
        if not isinstance(x, np.ndarray | np.generic) or (x.dtype, x.shape) != (whole.dtype, tile.shape):
            return None
        tile[...] = x
    return whole, tiling


@client_cache(_MAX_TILINGS)
def _tiling(sharding: Any, rank: int) -> Tiled | None:
    """Return the tiles of arrays that are divided, or None if devices have something else."""
    from atoll.client import jax_internals as internals

    try:
        tiles = internals.tiles(sharding, rank)
    except NotImplementedError:
        return None
    return None if tiles is None else Tiled(*tiles)
