"""Makes the small arrays of a tree with one request in `jax.device_put`, and passes large arrays to `large_writes`.

jaxlib's client sends the contents of each array in a separate call, and then a request that makes the array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from atoll.client.jax_patches.large_writes import detached, made_of
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll, submit
from atoll.protocol.questions import MAX_ARRAYS, MAX_CONTENTS
from atoll.protocol.submission import PutArray, Putting, encode
from atoll.transfers.dtypes import dtype_name

MAX_BYTES = 1 << 14  # of an array that is made together with others
MIN_ARRAYS = 4  # the request is answered twice before the first array can be used


def _together(one_by_one: Callable[..., Any]) -> Callable[..., Any]:
    from atoll.client import jax_internals as internals

    def _shard_np_array(
        xs: Sequence[Any], shardings: Sequence[Any], layouts: Sequence[Any], copy_semantics: Sequence[Any]
    ) -> list[Any]:
        xs = [
            detached(x, sharding) if copies == internals.CopySemantics.ALWAYS_COPY else x
            for x, sharding, copies in zip(xs, shardings, copy_semantics, strict=True)
        ]
        groups: dict[Any, list[int]] = defaultdict(list)
        made: dict[int, Any] = {}
        if internals.host_to_device_guard() in (None, "allow"):
            for i, (x, sharding, layout) in enumerate(zip(xs, shardings, layouts, strict=True)):
                if layout is not None:
                    continue
                if len(xs) >= MIN_ARRAYS and (device := _device(x, sharding)) is not None:
                    groups[device].append(i)
                elif (array := made_of(x, sharding)) is not None:
                    made[i] = array
        for device, positions in groups.items():
            for batch in _batches(xs, positions):
                if len(batch) >= MIN_ARRAYS:
                    made |= zip(batch, _make(device, [(xs[i], shardings[i]) for i in batch]), strict=False)
        rest = [i for i in range(len(xs)) if i not in made]
        if rest:
            chosen = ([each[i] for i in rest] for each in (xs, shardings, layouts, copy_semantics))
            made |= zip(rest, one_by_one(*chosen), strict=True)
        return [made[i] for i in range(len(xs))]

    return _shard_np_array


def _device(x: Any, sharding: Any) -> Any:
    """Return the device of Atoll on which the array can be made together with others, or None."""
    from atoll.client.jax_internals import devices_of, has_numpy_contents, is_canonical

    if not isinstance(x, np.ndarray | np.generic) or x.nbytes > MAX_BYTES:
        return None
    devices = devices_of(sharding)
    if devices is None or len(devices) != 1 or not is_atoll(devices[0].client):
        return None
    if sharding.memory_kind not in (None, devices[0].default_memory().kind):
        return None
    return devices[0] if has_numpy_contents(x.dtype) and is_canonical(x.dtype) else None


def _batches(xs: Sequence[Any], positions: Sequence[int]) -> list[list[int]]:
    """Divide arrays into those that one request can make."""
    batches: list[list[int]] = [[]]
    size = 0
    for i in positions:
        if len(batches[-1]) == MAX_ARRAYS or size + xs[i].nbytes > MAX_CONTENTS:
            batches.append([])
            size = 0
        batches[-1].append(i)
        size += xs[i].nbytes
    return batches


def _make(device: Any, arrays: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return arrays with these contents and shardings, or nothing if the server refuses."""
    from atoll.client import jax_internals as internals

    types = tuple(PutArray(dtype_name(x.dtype), x.shape) for x, _ in arrays)
    putting = Putting(device.id, types, b"".join(np.asarray(x).tobytes() for x, _ in arrays))
    handlers = [internals.result_handler(internals.abstractify(x), sharding, True) for x, sharding in arrays]
    try:
        launched = submit(device.client, encode(putting)).execute_sharded([])
        made: list[Any] = launched.consume_with_handlers(handlers)
    except (RuntimeError, ValueError):  # JaxRuntimeError is a RuntimeError
        return []
    return made


PATCH = Patch(
    name="writes of trees",
    enables="`jax.device_put` of many small arrays with one request",
    changes=(
        Replacement(
            "jax._src.interpreters.pxla",
            "_shard_np_array",
            _together,
            ("xs", "shardings", "layouts", "copy_semantics"),
            copies=("jax._src.interpreters.pxla",),
        ),
    ),
)
