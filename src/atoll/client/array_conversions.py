"""Converts the real numbers of arrays to another dtype, on their devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from atoll.client.array_packing import mesh_of
from atoll.client.client_caches import client_cache


def converted(arrays: Sequence[Any], dtype: Any) -> list[Any]:
    """Return the arrays, with all arrays of real numbers converted to the dtype, on the same devices."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for position, each in enumerate(arrays):
        if jnp.issubdtype(each.dtype, jnp.floating) and each.dtype != dtype:
            groups[tuple(each.sharding._device_assignment)].append(position)
    result = list(arrays)
    for positions in groups.values():
        some = [arrays[position] for position in positions]
        with mesh_of(some[0].sharding):
            made = _converting(dtype, tuple(each.sharding for each in some))(*some)
        for position, each in zip(positions, made, strict=True):
            result[position] = each
    return result


@client_cache(256)
def _converting(dtype: Any, shardings: tuple[Any, ...]) -> Any:
    def atoll_convert(*xs: Any) -> list[Any]:
        return [x.astype(dtype) for x in xs]

    return jax.jit(atoll_convert, out_shardings=list(shardings))
