"""Makes small arrays with one request, which jaxlib's client does not have to wait for.

jaxlib's client first sends the contents in a call of their own, and waits for its answer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.client.jax_patches.host_callbacks import TABLE
from atoll.client.jax_patches.host_writes import made_first_by
from atoll.client.jax_patches.patch import Patch
from atoll.client.plugin_programs import is_atoll
from atoll.ir.types import Replicated, Tiled
from atoll.transfers.shared_slots import SLOT_BYTES

_MOST_HANDLERS = 512


def made_of(aval: Any, sharding: Any, xs: Sequence[Any], devices: Sequence[Any], committed: bool) -> Any:
    """Return an array with a shard of `xs` on each device, or None if JAX itself has to make it."""
    from atoll.client import jax_internals as internals

    x = xs[0]
    if not isinstance(x, np.ndarray | np.generic) or x.nbytes > SLOT_BYTES:
        return None
    is_whole = len(devices) == 1 or sharding.is_fully_replicated
    if is_whole and any([each is not x for each in xs]):
        return None
    if not is_atoll(devices[0].client) or internals.host_to_device_guard() not in (None, "allow"):
        return None
    if sharding.memory_kind not in (None, devices[0].default_memory().kind):
        return None
    if aval.dtype != x.dtype or not internals.has_numpy_contents(aval.dtype) or not TABLE.has_slots(devices[0].client):
        return None
    tiling = Replicated() if is_whole else _tiling(sharding, len(aval.shape))
    if tiling is None:
        return None
    if not is_whole:
        x = _joined(xs, sharding, devices, aval)
        if x is None:
            return None
    try:
        results = TABLE.small_writes.start(x, devices, tiling)
    except (RuntimeError, ValueError):  # JaxRuntimeError is a RuntimeError
        return None
    return None if results is None else results.consume_with_handlers([_handler(aval, sharding, committed)])[0]


@functools.lru_cache(maxsize=_MOST_HANDLERS)
def _tiling(sharding: Any, rank: int) -> Tiled | None:
    """Return the tiles of arrays that are divided, or None if devices have something else."""
    from atoll.client import jax_internals as internals

    try:
        tiles = internals.tiles(sharding, rank)
    except NotImplementedError:
        return None
    return None if tiles is None else Tiled(*tiles)


def _joined(xs: Sequence[Any], sharding: Any, devices: Sequence[Any], aval: Any) -> np.ndarray[Any, Any] | None:
    """Return the whole array, or None if it is not small, or if these are not its shards."""
    if math.prod(aval.shape) * aval.dtype.itemsize > SLOT_BYTES or len(sharding._device_assignment) != len(devices):
        return None
    indices = sharding.devices_indices_map(aval.shape)
    whole = np.empty(aval.shape, aval.dtype)
    for x, device in zip(xs, devices, strict=True):
        tile = whole[indices[device]]
        if not isinstance(x, np.ndarray | np.generic) or (x.dtype, x.shape) != (whole.dtype, tile.shape):
            return None
        tile[...] = x
    return whole


@functools.lru_cache(maxsize=_MOST_HANDLERS)
def _handler(aval: Any, sharding: Any, committed: bool) -> Any:
    from atoll.client import jax_internals as internals

    return internals.result_handler(aval, sharding, committed)


PATCH = Patch(
    name="small writes",
    enables="`jax.device_put` and `jnp.asarray` of small arrays without a round trip",
    changes=(made_first_by(made_of),),
)
