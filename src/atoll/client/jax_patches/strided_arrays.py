"""Lets `jax.device_put` take NumPy arrays of any strides.

jaxlib's IFRT proxy client refuses strides below 1, which x[::-1] and np.broadcast_to have; every other client of jaxlib
copies such an array. So it is copied here, just before jaxlib's one function through which JAX sends host memory. (The
fast path of `jax.jit` does not use that function. There jaxlib refuses the array, and JAX falls back to the function by
itself.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll


def _copying(send: Callable[..., Any]) -> Callable[..., Any]:
    def batched_device_put(
        aval: Any, sharding: Any, xs: Sequence[Any], devices: Sequence[Any], *others: Any, **options: Any
    ) -> Any:
        if devices and is_atoll(devices[0].client):
            xs = [_sendable(x) for x in xs]
        return send(aval, sharding, xs, devices, *others, **options)

    return batched_device_put


def _sendable(array: Any) -> Any:
    if isinstance(array, np.ndarray) and array.strides and min(array.strides) < 1:
        return np.array(array, order="C")
    return array


PATCH = Patch(
    name="strided arrays",
    lifts="Negative or zero strides are not fully supported",
    replacements=(
        Replacement("jaxlib.xla_client", "batched_device_put", _copying, ("aval", "sharding", "xs", "devices")),
    ),
)
