"""Sends the script's module path, directory and JAX configuration with each function of colocated Python.

jaxlib makes a program of the pickled function only. No process on its way unpickles it, so the settings precede the
pickle: see `protocol.messages.python_messages`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.protocol.messages.python_messages import ClientSettings, with_settings

# Settings that concern only this process and its devices.
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


def _with_settings(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_colocated_python_program(name: str, text: bytes, devices: Any, *specs: Any) -> Any:
        if is_atoll(devices[0].client):
            text = with_settings(settings(), text)
        return make(name, text, devices, *specs)

    return make_colocated_python_program


def settings() -> ClientSettings:
    """Return the current settings of this process."""
    import jax

    path = tuple(os.path.abspath(each) for each in sys.path)
    config = {
        name: value
        for name, value in jax.config.values.items()
        if name not in _NOT_FOR_HOSTS and type(value) in (bool, int, float, str)
    }
    return ClientSettings(os.getcwd(), path, config)


PATCH = Patch(
    name="settings of colocated Python",
    enables="the user's modules and settings in functions of colocated Python",
    changes=(
        Replacement(
            "jaxlib._jax:ifrt_programs",
            "make_colocated_python_program",
            _with_settings,
            ("name", "picked_function", "devices"),
        ),
    ),
)
