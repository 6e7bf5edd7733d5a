"""Lets `jax.device_put` take NumPy arrays of any strides.

jaxlib's IFRT proxy client refuses strides below 1 ("Negative or zero strides are not fully supported"), which x[::-1]
and np.broadcast_to have; every other client of jaxlib copies such an array. So it is copied here, just before jaxlib's
one function through which JAX sends host memory. (The fast path of `jax.jit` does not use that function. There jaxlib
refuses the array, and JAX falls back to the function by itself.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def accept_any_strides() -> None:
    """Wraps jaxlib's function, once; where this JAX has none of that name, the client's refusal stands."""
    from jax._src.lib import xla_client

    send = getattr(xla_client, "batched_device_put", None)
    if send is not None and not hasattr(send, "__wrapped__"):
        xla_client.batched_device_put = _copying(send)


def _copying(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def batched_device_put(aval: Any, sharding: Any, xs: Sequence[Any], *others: Any, **options: Any) -> Any:
        return send(aval, sharding, [_sendable(x) for x in xs], *others, **options)

    return batched_device_put


def _sendable(array: Any) -> Any:
    if isinstance(array, np.ndarray) and array.strides and min(array.strides) < 1:
        return np.array(array, order="C")
    return array
