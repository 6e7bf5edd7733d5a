"""Reads arrays with one request, whose contents hosts send to this process without jaxlib's client.

jaxlib's client sends three requests for an array, and waits for two of them. It receives large contents in messages of
gRPC and copies them several times. A host on this machine shares memory with this process instead. A host on another
machine sends large contents on a channel that this process has opened, and others to the proxy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.jax_patches.read_table import ArrivingContents
from atoll.client.plugin_programs import client_of, is_atoll

MIN_BYTES = 1 << 20  # of contents for which a direct channel to a host on another machine is opened
_REQUESTED = "_atoll_contents"  # attribute of an array whose contents were requested


def request_contents(array: Any) -> ArrivingContents | None:
    """Request an array's contents, unless they were requested before. Return None if JAX itself has to read them."""
    from atoll.client.jax_internals import device_to_host_guard, has_numpy_contents

    if not is_atoll(client_of(array)) or device_to_host_guard() not in (None, "allow"):
        return None
    requested: ArrivingContents | None = getattr(array, _REQUESTED, None)
    if requested is not None:
        return requested
    nbytes = array.nbytes
    if array.is_deleted() or not nbytes or not has_numpy_contents(array.dtype):
        return None
    devices = array.sharding._device_assignment
    if _is_on_several_hosts(array):
        return None  # each host sends only its own shards
    losses = CLIENT_CHANNEL.reads.losses
    if not CLIENT_CHANNEL.receives_from(devices[0].client):
        return None
    if nbytes >= MIN_BYTES:
        CLIENT_CHANNEL.sends_to(devices[0])  # asks for a direct channel if necessary
    try:
        requested = CLIENT_CHANNEL.reads.start(array, devices, nbytes, losses)
    except (RuntimeError, ValueError):  # JaxRuntimeError is a RuntimeError
        return None
    setattr(array, _REQUESTED, requested)
    return requested


def is_requested(array: Any) -> bool:
    """Return whether an array's contents were requested, and no one has waited for them."""
    return getattr(array, _REQUESTED, None) is not None


def value_of(array: Any, contents: ArrivingContents) -> Any:
    """Return an array's value once its contents have arrived, or None if JAX itself has to read them.

    Raise JaxRuntimeError if the read has failed.
    """
    import jax

    found = contents.wait()
    if getattr(array, _REQUESTED, None) is contents:
        with suppress(AttributeError):  # another thread that waited for the same contents was faster
            delattr(array, _REQUESTED)
    if found is None:
        if not contents.error.ok:
            raise jax.errors.JaxRuntimeError(str(contents.error))
        return None
    value = found.view(array.dtype)[: math.prod(array.shape)].reshape(array.shape)
    value.flags.writeable = False
    return value


def _value_of_shards(array: Any) -> Any:
    """Return the value of an array on several hosts, or None if JAX itself has to read it."""
    import numpy as np

    from atoll.client import jax_internals as internals

    if internals.has_partial_sums(array.sharding, array.ndim):
        return None
    indices = array.sharding.addressable_devices_indices_map(array.shape).values()
    shards = {str(index): (index, array.addressable_data(i)) for i, index in enumerate(indices)}
    requested = [(index, shard, request_contents(shard)) for index, shard in shards.values()]
    value = np.empty(array.shape, array.dtype)
    for index, shard, contents in requested:
        part = None if contents is None else value_of(shard, contents)
        if part is None:
            return None
        value[index] = part
    value.flags.writeable = False
    return value


def _reading(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def _value(self: Any) -> Any:
        if self._npy_value is None:
            contents = request_contents(self)
            value = None
            if contents is not None:
                value = value_of(self, contents)
            elif _is_on_several_hosts(self):
                value = _value_of_shards(self)
            if value is not None:
                self._npy_value = value
        return read(self)

    return _value


def _is_on_several_hosts(array: Any) -> bool:
    """Return whether hosts of Atoll have different parts of the array."""
    if array.is_deleted() or array.is_fully_replicated or not is_atoll(client_of(array)):
        return False
    return len({device.host for device in array.sharding._device_assignment}) > 1


def _has_or_requests(array: Any) -> bool:
    """Return whether this process has the contents of an array or, after this call, has requested them from Atoll."""
    if array.is_deleted():
        return False
    return array._npy_value is not None or request_contents(array) is not None


def _requesting(copy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def copy_to_host_async(self: Any) -> Any:
        return None if _has_or_requests(self) else copy(self)

    return copy_to_host_async


def _requesting_each(copy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def batched_copy_to_host_async(arrays: Sequence[Any]) -> Any:
        others = [array for array in arrays if not _has_or_requests(array)]
        return copy(others) if others else None

    return batched_copy_to_host_async


PATCH = Patch(
    name="direct reads",
    enables="reads of arrays with one round trip, and of large arrays through shared memory",
    changes=(
        Replacement("jaxlib._jax:ArrayImpl", "_value", _reading, ("self",)),
        Replacement("jaxlib._jax:ArrayImpl", "copy_to_host_async", _requesting, ("self",)),
    ),
)

BATCH_PATCH = Patch(
    name="direct reads of several arrays",
    enables="direct reads of the arrays of a tree, instead of reading them twice",
    changes=(Replacement("jaxlib._jax", "batched_copy_to_host_async", _requesting_each, ("arrays",)),),
    since=(0, 12),
)
