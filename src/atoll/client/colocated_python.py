"""What functions of colocated Python bring along of the user's process: its path, directory and configuration of JAX.

A program text is a pickle that nobody opens on its way. The settings stand before it: see `protocol.messages.python`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from atoll.client.plugin_programs import is_atoll
from atoll.protocol.messages.python import ClientSettings, with_settings

# What is the process's own, or about the devices of this one.
_NOT_FOR_HOSTS = (
    "jax_platforms",
    "jax_platform_name",
    "jax_num_cpu_devices",
    "jax_default_device",
    "jax_cpu_collectives_implementation",
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_mock_gpu_topology",
    "jax_coordination_service",
)


def bring_settings() -> None:
    """Has functions for devices of Atoll bring along the settings that hold when they are made."""
    from jax.experimental.colocated_python import func

    programs: Any = func.ifrt_programs
    if not isinstance(programs, _Programs):
        private: Any = func
        private.ifrt_programs = _Programs(programs)


class _Programs:
    """jaxlib's module of IFRT programs, as JAX's colocated Python uses it."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def make_colocated_python_program(self, name: str, text: bytes, devices: Any, *specs: Any) -> Any:
        if is_atoll(devices[0].client):
            text = with_settings(settings(), text)
        return self._module.make_colocated_python_program(name, text, devices, *specs)


def settings() -> ClientSettings:
    """Those of this process, now."""
    import jax

    path = tuple(os.path.abspath(each) for each in sys.path)
    config = {
        name: value
        for name, value in jax.config.values.items()
        if name not in _NOT_FOR_HOSTS and type(value) in (bool, int, float, str)
    }
    return ClientSettings(os.getcwd(), path, config)
