"""Starts JAX in a worker: all that must be set before it makes its backend, and then the backend."""

from __future__ import annotations

import os

import jax

from atoll.devices.device import DeviceBackend
from atoll.devices.membership import Membership
from atoll.devices.xla import island
from atoll.devices.xla.backend import XlaBackend, self_test


def open_backend(devices: int, cache_directory: str, member: Membership | None) -> DeviceBackend:
    """This host's devices; with a membership, once all hosts of the island have joined.

    Raises RuntimeError where this jaxlib lacks what a worker needs, or where the island does not come together.
    """
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        jax.config.update("jax_num_cpu_devices", devices)
    if cache_directory:
        jax.config.update("jax_compilation_cache_dir", cache_directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if member is not None:
        island.join(member.address, member.rank, member.hosts, member.hostname)
    backend = XlaBackend()
    self_test(backend)
    return backend
