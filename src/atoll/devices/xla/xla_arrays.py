"""Local arrays: *stacked*, one jax array over the local devices whose first dimension counts the shards.

Executables look at the shards alone, so a worker needs to know nothing of how the client laid an array out globally.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax._src.lib import _jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.transfers.dtypes import numpy_dtype


class Uneven:
    """Local shards of different shapes, or of strings: they can be moved and fetched, not computed with."""

    def __init__(self, shards: tuple[Any, ...]) -> None:
        self.shards = shards

    @property
    def dtype(self) -> Any:
        return self.shards[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def is_deleted(self) -> bool:
        return any(shard.is_deleted() for shard in self.shards)

    def is_ready(self) -> bool:
        return all(shard.is_ready() for shard in self.shards)

    def delete(self) -> None:
        for shard in self.shards:
            shard.delete()

    def block_until_ready(self) -> None:
        for shard in self.shards:
            shard.block_until_ready()


def shards_of(array: Any) -> Sequence[Any]:
    """The single-device arrays of a stacked one, in order; they share its memory."""
    if isinstance(array, Uneven):
        return array.shards
    shards: Sequence[Any] = array._arrays
    return shards


@lru_cache(maxsize=4096)
def stacked_type(dtype: Any, shape: tuple[int, ...], devices: tuple[Any, ...], memory_kind: str) -> tuple[Any, Any]:
    kind = memory_kind or None
    if len(devices) == 1:
        return jax.core.ShapedArray(shape, dtype), SingleDeviceSharding(devices[0], memory_kind=kind)
    mesh = Mesh(np.array(devices, dtype=object), ("shard",))
    if not shape:
        return jax.core.ShapedArray(shape, dtype), NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    stacked = (len(devices) * shape[0], *shape[1:])
    return jax.core.ShapedArray(stacked, dtype), NamedSharding(mesh, PartitionSpec("shard"), memory_kind=kind)


def stacked_handler(dtype: str, shape: tuple[int, ...], devices: tuple[Any, ...], memory_kind: str) -> Any:
    if dtype == "token":
        dtype, shape = "bool", (0,)
    aval, sharding = stacked_type(numpy_dtype(dtype), shape, devices, memory_kind)
    try:
        return _jax.array_result_handler(aval, sharding, committed=True, _skip_checks=True)
    except TypeError:  # jaxlib >= 0.12 checks nothing to begin with
        return _jax.array_result_handler(aval, sharding, committed=True)
