"""Makes large arrays of contents that this process sends to hosts itself.

Hosts on this machine receive them through few shared blocks, and hosts on other machines on a channel of this process.
jaxlib's client writes large contents to a new file in shared memory, whose fresh pages cost more than the copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL
from atoll.client.jax_patches.host_writes import made_first_by, whole_array
from atoll.client.jax_patches.patch import Patch
from atoll.client.plugin_programs import is_atoll
from atoll.ir.types import REPLICATED
from atoll.transfers.shared_slots import SLOT_BYTES

MIN_BYTES = 1 << 20  # of a shard that is sent by itself
MAX_JOINED = 16 << 20  # bytes of an array whose shards are copied into one


def _is_large(x: Any) -> bool:
    """Return whether the contents of `x` can be sent from its memory, and are large enough."""
    return isinstance(x, np.ndarray) and x.nbytes >= MIN_BYTES and bool(x.flags.c_contiguous)


def detached(x: Any, sharding: Any) -> Any:
    """Return a copy of `x` if its contents may be sent from its memory after the call, and otherwise `x`."""
    from atoll.client import jax_internals as internals

    if not isinstance(x, np.ndarray):
        return x
    devices = internals.devices_of(sharding)
    return x.copy() if devices is not None and is_atoll(devices[0].client) else x


def made_of(x: Any, sharding: Any) -> Any:
    """Return an array with the contents of `x`, or None if JAX itself has to make it."""
    from atoll.client import jax_internals as internals

    if not _is_large(x):
        return None
    devices = internals.devices_of(sharding)
    if devices is None or not is_atoll(devices[0].client):
        return None
    shards = [x]
    if len(devices) > 1:
        indices = list(sharding.addressable_devices_indices_map(x.shape).values())
        if len(set(map(str, indices))) < len(devices):  # jaxlib's client sends equal contents once
            return None
        shards = [x[index] for index in indices]
        if not all(map(_is_large, shards)):
            return None
    return _make(internals.abstractify(x), sharding, shards, devices, committed=True)


def _make(aval: Any, sharding: Any, xs: Sequence[Any], devices: Sequence[Any], committed: bool) -> Any:
    """Return an array of these shards, or None if JAX itself has to make it."""
    from atoll.client import jax_internals as internals

    if aval.dtype != xs[0].dtype or not _can_send(aval, sharding, devices):
        return None
    handlers = [internals.shard_handler(x.shape, x.dtype, device) for x, device in zip(xs, devices, strict=True)]
    if len(devices) == 1:
        handlers = [internals.result_handler(aval, sharding, committed)]
    try:
        made = [
            CLIENT_CHANNEL.writes.start(x, [device]).consume_with_handlers([handler])[0]
            for x, device, handler in zip(xs, devices, handlers, strict=True)
        ]
    except (RuntimeError, ValueError):  # JaxRuntimeError is a RuntimeError
        return None
    return made[0] if len(made) == 1 else internals.of_shards(aval, sharding, made, committed)


def _can_send(aval: Any, sharding: Any, devices: Sequence[Any]) -> bool:
    """Return whether this process can send contents of an array of this type to all devices."""
    from atoll.client import jax_internals as internals

    if not is_atoll(devices[0].client) or internals.host_to_device_guard() not in (None, "allow"):
        return False
    if sharding.memory_kind not in (None, devices[0].default_memory().kind):
        return False
    return internals.has_numpy_contents(aval.dtype) and all([CLIENT_CHANNEL.sends_to(device) for device in devices])


def _make_joined(aval: Any, sharding: Any, xs: Sequence[Any], devices: Sequence[Any], committed: bool) -> Any:
    """Return an array on several devices of one host, whose contents are sent together, or None."""
    from atoll.client import jax_internals as internals

    if len(devices) == 1 or not isinstance(xs[0], np.ndarray):
        return None
    if not SLOT_BYTES < math.prod(aval.shape) * aval.dtype.itemsize <= MAX_JOINED:
        return None
    if len({getattr(device, "host", None) for device in devices}) > 1 or not _can_send(aval, sharding, devices):
        return None
    found = whole_array(aval, sharding, xs, devices, MAX_JOINED)
    if found is None:
        return None
    whole, tiling = np.asarray(found[0]), found[1]
    if not CLIENT_CHANNEL.writes.is_frequent(whole, devices, tiling):
        return None
    try:
        # The script may change its own array, and `whole_array` has copied those that are divided.
        contents = np.array(whole, order="C") if tiling is REPLICATED else whole
        results = CLIENT_CHANNEL.writes.start(contents, devices, tiling)
    except (RuntimeError, ValueError):  # JaxRuntimeError is a RuntimeError
        return None
    return results.consume_with_handlers([internals.result_handler(aval, sharding, committed)])[0]


def _make_large(aval: Any, sharding: Any, xs: Sequence[Any], devices: Sequence[Any], committed: bool) -> Any:
    """Return an array of these shards if all are large and none stands twice, or None."""
    if not all(map(_is_large, xs)) or len({id(x) for x in xs}) < len(xs):
        return _make_joined(aval, sharding, xs, devices, committed)
    return _make(aval, sharding, xs, list(devices), committed)


PATCH = Patch(
    name="large writes",
    enables="`jax.device_put` and `jax.make_array_from_callback` of large arrays at memory speed on one machine, and "
    "at the network's speed from another one",
    changes=(made_first_by(_make_large),),
)
