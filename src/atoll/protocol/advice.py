"""Advice for users, where front ends and workers refuse the same thing."""

from __future__ import annotations

CALLBACK_ADVICE = (
    "this program calls back into the client's Python (jax.pure_callback, io_callback or debug.print/callback), which "
    "only Atoll's own plug-in can serve: install the package atoll, in the cluster's version, where the script runs; "
    "or return the values and use them outside of jit"
)
INSPECT_SHARDING_ADVICE = (
    "this program calls jax.debug.inspect_array_sharding, which calls back into the client's Python while XLA "
    "compiles, and XLA compiles in another process here; return the array from jit and look at its .sharding, or call "
    "jax.debug.visualize_array_sharding outside of jit"
)
