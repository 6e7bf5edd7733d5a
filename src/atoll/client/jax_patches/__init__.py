"""Atoll's changes of JAX in the user's process: the table of patches. `patch` documents what a patch is.

Only processes that use Atoll are changed: the plug-in installs the patches, once per process, before JAX creates its
first client.
"""

from __future__ import annotations

import os

from atoll.client.deferred_interrupts import deferred_interrupts
from atoll.client.jax_patches import (
    buffer_protocol,
    colocated_python,
    compile_time_callbacks,
    cpu_devices,
    device_hosts,
    device_put_resharding,
    direct_reads,
    dlpack,
    element_reads,
    ffi_calls,
    host_arguments,
    host_callbacks,
    introspection,
    large_writes,
    many_threads,
    meshes_over_islands,
    newer_operations,
    number_operands,
    numpy_copies,
    other_clients,
    patch,
    profiler,
    serialized_executables,
    several_meshes,
    small_writes,
    strided_arrays,
    transfer_server,
    tree_reads,
    tree_writes,
)
from atoll.client.jax_patches.patch import Patch

PATCHES: tuple[Patch, ...] = (
    strided_arrays.PATCH,
    other_clients.PATCH,
    device_put_resharding.PATCH,
    device_put_resharding.TREE_PATCH,
    tree_reads.PATCH,
    direct_reads.PATCH,
    direct_reads.BATCH_PATCH,
    element_reads.PATCH,
    tree_writes.PATCH,
    large_writes.PATCH,
    numpy_copies.PATCH,
    small_writes.PATCH,
    host_arguments.PATCH,
    number_operands.PATCH,
    dlpack.PATCH,
    buffer_protocol.PATCH,
    introspection.ADDRESS_PATCH,
    introspection.MEMORY_PATCH,
    introspection.HARDWARE_PATCH,
    introspection.COST_PATCH,
    introspection.MODULES_PATCH,
    device_hosts.PATCH,
    cpu_devices.PATCH,
    meshes_over_islands.PATCH,
    serialized_executables.PATCH,
    transfer_server.PATCH,
    newer_operations.PATCH,
    ffi_calls.PATCH,
    host_callbacks.PATCH,
    host_callbacks.SEND_AND_RECEIVE_PATCH,
    compile_time_callbacks.PATCH,
    compile_time_callbacks.MODULE_PATCH,
    compile_time_callbacks.CLIENT_PATCH,
    compile_time_callbacks.PLUGIN_PATCH,
    colocated_python.PATCH,
    profiler.PATCH,
    profiler.EXPORT_PATCH,
    several_meshes.PATCH,
    many_threads.PATCH,
)

_installed: tuple[Patch, ...] | None = None


def install() -> tuple[Patch, ...]:
    """Install the patches at the first call. Return the installed patches."""
    global _installed
    if _installed is None:
        import jax

        with deferred_interrupts():  # otherwise the next call would install some patches twice
            _installed = patch.install(PATCHES, jax.__version_info__)
            if _installed:
                from atoll.client.jax_internals import leave_out_of_tracebacks

                # Replaced functions are on the stack while JAX records the user's line, or between it and an error.
                leave_out_of_tracebacks(os.path.join(os.path.dirname(os.path.dirname(__file__)), ""))
    return _installed
