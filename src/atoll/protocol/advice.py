"""Advice for users, where front ends and workers refuse the same thing."""

from __future__ import annotations

CALLBACK_ADVICE = (
    "this program calls back into the client's Python (jax.pure_callback, io_callback or debug.print/callback), which "
    "jaxlib's IFRT proxy client cannot serve; return the values and use them outside of jit, or run that part on a "
    "local CPU device (JAX_PLATFORMS=atoll,cpu and jax.default_device(jax.local_devices(backend='cpu')[0]))"
)
INSPECT_SHARDING_ADVICE = (
    "this program calls jax.debug.inspect_array_sharding, which calls back into the client's Python while XLA "
    "compiles, and XLA compiles in another process here; return the array from jit and look at its .sharding, or call "
    "jax.debug.visualize_array_sharding outside of jit"
)
