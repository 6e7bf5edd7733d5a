"""A computation that takes its time and no processor: a custom call of XLA's CPU client that sleeps.

`register()` makes it known to this process. Workers learn of it by the `sitecustomize` beside this file.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import jax
import jax.numpy as jnp

_NAME = "atoll_benchmarks_sleep"
_Handler = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.POINTER(ctypes.c_float)))


def _sleep(result: Any, arguments: Any) -> None:
    time.sleep(arguments[1][0])
    result[0] = arguments[0][0]


_HANDLER = _Handler(_sleep)  # which XLA calls for as long as this process lives


def register() -> None:
    from jax._src.lib import xla_client

    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new(ctypes.cast(_HANDLER, ctypes.c_void_p), b"xla._CUSTOM_CALL_TARGET", None)
    xla_client.register_custom_call_target(_NAME, capsule, platform="cpu", api_version=0)


def after(value: jax.Array, seconds: float) -> jax.Array:
    """The scalar, so much later."""
    call = jax.ffi.ffi_call(_NAME, jax.ShapeDtypeStruct((), jnp.float32), custom_call_api_version=1)
    later: jax.Array = call(value, jnp.float32(seconds))
    return later
