"""Starts JAX in a worker: all that must be set before it makes its backend, and then the backend."""

from __future__ import annotations

import os

import jax

from atoll.devices.device import DeviceBackend
from atoll.devices.device_kinds import Membership
from atoll.devices.xla import jax_cache, xla_island
from atoll.devices.xla.xla_backend import XlaBackend, self_test


def open_backend(devices: int, cache_directory: str, member: Membership | None) -> DeviceBackend:
    """This host's devices; with a membership, once all hosts of the island have joined.

    Raises RuntimeError where this jaxlib lacks what a worker needs, or where the island does not come together.
    """
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        jax.config.update("jax_num_cpu_devices", devices)
    programs = jax_cache.open_programs(cache_directory)
    jax_cache.use_programs(programs, cache_directory)
    if member is not None:
        xla_island.join(member.address, member.rank, member.hosts, member.hostname)
    backend = XlaBackend(programs)
    jax_cache.check_in_use(backend.client)
    self_test(backend)
    return backend
