"""Reads the small arrays of a tree with one request in `jax.device_get`.

jaxlib's client sends two requests per array, and waits for the second of one array before it sends that of the next.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import ask, is_atoll, staging, staging_call
from atoll.errors import Kind, details_of
from atoll.protocol.questions import MAX_ARRAYS, MAX_CONTENTS, MAX_SHARDS, ContentsQuestion

MAX_BYTES = 1 << 16  # of an array that is read together with others
# Guards of explicit transfers to the host that allow them without a message.
_GUARDS = (None, "allow", "log", "disallow")


def _together(one_by_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from atoll.client import jax_internals as internals

    def device_get(x: Any) -> Any:
        from jax.tree_util import tree_leaves

        groups: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        for leaf in {id(leaf): leaf for leaf in tree_leaves(x) if is_readable(leaf)}.values():
            groups[tuple(leaf.sharding._device_assignment)].append(leaf)
        for devices, arrays in groups.items():
            if len(arrays) > 1 and is_atoll(devices[0].client) and internals.device_to_host_guard() in _GUARDS:
                for batch in batches(arrays):
                    _read(devices, batch)
        return one_by_one(x)

    return device_get


def is_readable(leaf: Any) -> bool:
    """Return whether the leaf is a small array whose value must be read from devices, as bytes in row-major order."""
    from atoll.client.jax_internals import Array, has_numpy_contents

    return (
        isinstance(leaf, Array)
        and leaf._npy_value is None
        and not leaf.is_deleted()
        and leaf.nbytes <= MAX_BYTES
        and has_numpy_contents(leaf.dtype)
        and (leaf.is_fully_replicated or _is_divided(leaf))
    )


def _is_divided(array: Any) -> bool:
    """Return whether each element of an array on several devices is an element of one or more shards."""
    from atoll.client import jax_internals as internals

    return array.is_fully_addressable and not internals.has_partial_sums(array.sharding, array.ndim)


def _shards(array: Any) -> int:
    """Return how many different shards an array has at most."""
    return 1 if array.is_fully_replicated else len(array.sharding._device_assignment)


def batches(arrays: Sequence[Any]) -> Iterator[list[Any]]:
    """Divide arrays into the lists that one request can read."""
    batch: list[Any] = []
    size = shards = 0
    for array in arrays:
        count, nbytes = _shards(array), array.nbytes
        if len(batch) == MAX_ARRAYS or size + nbytes > MAX_CONTENTS or shards + count > MAX_SHARDS:
            yield batch
            batch, size, shards = [], 0, 0
        batch.append(array)
        size += nbytes
        shards += count
    yield batch


def _read(devices: tuple[Any, ...], arrays: Sequence[Any]) -> None:
    """Set the values of arrays on these devices. After most errors they have none, so JAX reads them one by one."""
    with staging:
        values = values_of(devices, arrays)
    for array, value in zip(arrays, values, strict=False):
        array._npy_value = value


def values_of(devices: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Return the values of arrays on these devices, which share memory, or [] if JAX has to read them one by one.

    The caller holds `staging`. Raise JaxRuntimeError if contents were lost, since another read would fail with an error
    that says less.
    """
    import jax
    import numpy as np

    client = devices[0].client
    try:
        stage = staging_call(client, tuple(device.id for device in devices))
        try:
            stage(list(arrays))
            contents = memoryview(ask(client, ContentsQuestion(len(arrays))))
        except BaseException:  # an interrupt, too
            with suppress(jax.errors.JaxRuntimeError):
                ask(client, ContentsQuestion(0))
            raise
    except (RuntimeError, ValueError) as error:  # JaxRuntimeError is a RuntimeError
        if details_of(error).kind is Kind.LINK:
            raise
        return []
    values = []
    start = 0
    for array in arrays:
        shape, dtype = array.shape, array.dtype
        value = np.frombuffer(contents, dtype, math.prod(shape), start)
        values.append(value.reshape(shape))
        start += value.nbytes
    return values


PATCH = Patch(
    name="reads of trees",
    enables="`jax.device_get` of many small arrays with one request",
    changes=(Replacement("jax._src.api", "device_get", _together, ("x",), copies=("jax",)),),
)
