"""What Atoll changes of JAX in the user's process: the table of patches. `patch` has the contract, each patch its file.

Only a process that uses Atoll is changed: the patches are put in place when its client is made, once for all.
"""

from __future__ import annotations

from atoll.client.jax_patches import (
    buffer_pointers,
    colocated_python,
    compile_time_callbacks,
    cost_analysis,
    device_put_resharding,
    dlpack,
    host_callbacks,
    many_threads,
    memory_stats,
    module_transformations,
    newer_operations,
    other_clients,
    patch,
    profiler,
    send_and_receive,
    serialized_executables,
    several_meshes,
    strided_arrays,
    transfer_server,
)
from atoll.client.jax_patches.patch import Patch

PATCHES: tuple[Patch, ...] = (
    strided_arrays.PATCH,
    other_clients.PATCH,
    device_put_resharding.PATCH,
    dlpack.PATCH,
    buffer_pointers.PATCH,
    cost_analysis.PATCH,
    memory_stats.PATCH,
    serialized_executables.PATCH,
    transfer_server.PATCH,
    newer_operations.PATCH,
    host_callbacks.PATCH,
    send_and_receive.PATCH,
    compile_time_callbacks.PATCH,
    module_transformations.PATCH,
    module_transformations.CLIENT_PATCH,
    colocated_python.PATCH,
    profiler.PATCH,
    profiler.EXPORT_PATCH,
    several_meshes.PATCH,
    many_threads.PATCH,
)

_installed: tuple[Patch, ...] | None = None


def install() -> tuple[Patch, ...]:
    """Puts the patches in place, the first time that it is called; returns those that are."""
    global _installed
    if _installed is None:
        import jax

        _installed = patch.install(PATCHES, jax.__version_info__)
    return _installed
