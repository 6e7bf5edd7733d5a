"""A computation that takes its time and no CPU: a custom call of XLA's CPU client that sleeps.

The call is libc's own `nanosleep`, so a worker that sleeps needs no Python for it and is not late because others do.
`register()` makes it known to this process. Workers learn of it by the `sitecustomize` beside this file.
"""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import jax.numpy as jnp

_NAME = "atoll_benchmarks_sleep"
_NANOSECONDS = 1_000_000_000


def register() -> None:
    from jax._src.lib import xla_client

    # XLA calls such a target with its result and its arguments, and nanosleep takes what to sleep and what is left.
    target = ctypes.cast(ctypes.CDLL(None).nanosleep, ctypes.c_void_p)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new(target, b"xla._CUSTOM_CALL_TARGET", None)
    xla_client.register_custom_call_target(_NAME, capsule, platform="cpu", api_version=0)


def after(value: jax.Array, seconds: float) -> jax.Array:
    """Return the scalar after this time."""
    whole, part = divmod(round(seconds * _NANOSECONDS), _NANOSECONDS)
    place = jax.lax.iota(jnp.int32, 4)  # of two numbers of 64 bits; an array would be a constant, which Shardy refuses
    timespec = jnp.where(place == 0, whole, jnp.where(place == 2, part, 0)).astype(jnp.int32)
    words = jnp.append(timespec, jax.lax.bitcast_convert_type(jnp.float32(value), jnp.int32))
    # The result is the argument's memory, so it says how long to sleep; behind that, the value goes through.
    shape = jax.ShapeDtypeStruct(words.shape, words.dtype)
    call: Any = jax.ffi.ffi_call(_NAME, shape, custom_call_api_version=1, input_output_aliases={0: 0})
    later: jax.Array = jax.lax.bitcast_convert_type(call(words)[-1], jnp.float32)
    return later
