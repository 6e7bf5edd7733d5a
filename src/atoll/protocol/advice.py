"""Advice for users, where front ends and workers refuse the same thing."""

from __future__ import annotations

CALLBACK_ADVICE = (
    "this program calls back into the client's Python (jax.pure_callback, io_callback or debug.print/callback), which "
    "only Atoll's own plug-in can serve: install the package atoll, in the cluster's version, where the script runs; "
    "or return the values and use them outside of jit"
)
COMPILE_CALL_ADVICE = (
    "this program calls back into the client's Python while XLA compiles it (jax.debug.inspect_array_sharding, "
    "visualize_array_sharding or custom_partitioning), which only Atoll's own plug-in can serve, in the process that "
    "lowered the program: install the package atoll, in the cluster's version, where the script runs"
)
