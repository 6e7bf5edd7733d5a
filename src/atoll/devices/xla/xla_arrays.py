"""Local arrays. A *stacked* array is one JAX array on the local devices, with the shards along its first dimension.

Executables only use the shards, so a worker does not need the array's global sharding.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax._src.lib import _jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.transfers.dtypes import numpy_dtype

# jaxlib 0.10 lists the shards of an array at the first use, without a lock. A second thread then gets part of the
# list or adds the shards again. The lock is reentrant: garbage collection may ask for other shards in the same thread.
_LISTING = threading.RLock()


def _nbytes(array: Any) -> int:
    """Return the size of an array, in bytes."""
    return int(array.size * array.dtype.itemsize)


if not hasattr(_jax.ArrayImpl, "nbytes"):  # JAX adds it when `jax.numpy` is imported (see `devices.partial_jax`)
    _jax.ArrayImpl.nbytes = property(_nbytes)


class UnevenShards:
    """Local shards of different shapes, or of strings. They can be moved and fetched, but not passed to executables."""

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
    """Return the single-device arrays of a local array, in order; they share its memory."""
    if isinstance(array, UnevenShards):
        return array.shards
    with _LISTING:
        shards: Sequence[Any] = array._arrays
    return shards


@lru_cache(maxsize=4096)
def stacked_type(dtype: Any, shape: tuple[int, ...], devices: tuple[Any, ...], memory_kind: str) -> tuple[Any, Any]:
    """Return the abstract value and the sharding of a stacked array with shards of `shape` on `devices`."""
    kind = memory_kind or None
    if len(devices) == 1:
        return jax.core.ShapedArray(shape, dtype), SingleDeviceSharding(devices[0], memory_kind=kind)
    mesh = Mesh(np.array(devices, dtype=object), ("shard",))
    if not shape:
        return jax.core.ShapedArray(shape, dtype), NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    stacked = (len(devices) * shape[0], *shape[1:])
    return jax.core.ShapedArray(stacked, dtype), NamedSharding(mesh, PartitionSpec("shard"), memory_kind=kind)


def stacked_handler(dtype: str, shape: tuple[int, ...], devices: tuple[Any, ...], memory_kind: str) -> Any:
    """Return jaxlib's handler that makes a stacked array from an executable's result."""
    if dtype == "token":
        dtype, shape = "bool", (0,)
    aval, sharding = stacked_type(numpy_dtype(dtype), shape, devices, memory_kind)
    try:
        return _jax.array_result_handler(aval, sharding, committed=True, _skip_checks=True)
    except TypeError:  # jaxlib >= 0.12 has no checks to skip
        return _jax.array_result_handler(aval, sharding, committed=True)
