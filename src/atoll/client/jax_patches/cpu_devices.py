"""Makes `jax.devices("cpu")` the devices of a cluster of CPUs, as JAX's rule for platforms demands.

Such a cluster has two kinds of CPU devices: those of its hosts and those of the script's process. In JAX, `d` is in
`jax.devices(d.platform)`, and libraries look devices up that way. The process's own devices remain
`jax.local_devices(backend="cpu")`, which is how JAX itself and most libraries name them. docs/guides/libraries.md
compares the libraries. With `ATOLL_CPU_DEVICES=script`, all lookups of "cpu" find the process's own devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.cluster.environment_variables import CPU_DEVICES, CpuDevices

_LOOKUPS = ("devices", "device_count", "local_device_count")
# Between JAX's `local_devices` and the new `devices`: the function that forwards calls to it.
_FRAMES = 3


def _of_the_cluster(lookup: Callable[..., Any]) -> Callable[..., Any]:
    from jax._src import xla_bridge

    file = xla_bridge.__file__

    def devices(backend: Any = None) -> Any:
        if backend == "cpu" and CPU_DEVICES.get() is not CpuDevices.SCRIPT and not _is_for_local_devices(file):
            default = xla_bridge.get_backend()
            if default.platform == "cpu" and is_atoll(default):
                return lookup(default)
        return lookup(backend)

    return devices


def _is_for_local_devices(file: str) -> bool:
    """Return whether JAX's `local_devices` calls, also in its call that installs the patches."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "local_devices" and frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


def answer_running_lookup() -> None:
    """Let the lookup that starts JAX's backends, such as a script's first `jax.devices("cpu")`, use the patch as well.

    Such a lookup runs JAX's function from before the patch, which next calls a method of the process's own client. For
    this call only, the method returns what the patched function returns. Call this while JAX creates its backends. The
    client "cpu" may be missing: with the platforms "atoll,cpu", JAX creates it after Atoll's.
    """
    from jax._src import xla_bridge
    from jax._src.lib import xla_client

    running = _running_lookup(xla_bridge.__file__)
    if running is None:
        return
    name = running.f_code.co_name
    clients = xla_client.Client
    original = getattr(clients, name)

    def answer(client: Any) -> Any:
        if sys._getframe(1) is not running:
            return original(client)
        setattr(clients, name, original)
        return getattr(xla_bridge, name)("cpu")

    setattr(clients, name, answer)


def _running_lookup(file: str) -> FrameType | None:
    """Return the frame of the lookup of "cpu" that starts JAX's backends, or None if another function does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == file and frame.f_code.co_name in _LOOKUPS:
            return frame if frame.f_locals.get("backend") == "cpu" else None
        frame = frame.f_back
    return None


PATCH = Patch(
    name="devices by platform",
    enables='`jax.devices("cpu")` on a cluster of CPUs',
    changes=tuple(
        Replacement("jax._src.xla_bridge", name, _of_the_cluster, ("backend",), copies=("jax",)) for name in _LOOKUPS
    ),
)
