"""Lets `jax.device_put` take NumPy arrays with any strides.

jaxlib's IFRT proxy client refuses strides below 1, as in x[::-1] and np.broadcast_to. All other clients of jaxlib copy
such an array. This patch copies it before it calls the function of jaxlib with which JAX sends host memory. The fast
path of `jax.jit` does not use that function: there jaxlib refuses the array, and JAX then calls the function.
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
        try:
            return np.array(array, order="C")
        except MemoryError:
            import jax

            text = f"RESOURCE_EXHAUSTED: Out of memory allocating {array.nbytes} bytes."  # as other clients of jaxlib
            raise jax.errors.JaxRuntimeError(text) from None
    return array


PATCH = Patch(
    name="strided arrays",
    enables="`jax.device_put` of NumPy arrays with negative or zero strides",
    error="Negative or zero strides are not fully supported",
    changes=(Replacement("jaxlib.xla_client", "batched_device_put", _copying, ("aval", "sharding", "xs", "devices")),),
)
