"""Makes `jax.devices("cpu")` the devices of a cluster of CPUs, as JAX's rule for platforms demands.

Such a cluster has two kinds of CPU devices: those of its hosts and those of the script's process. In JAX, `d` is in
`jax.devices(d.platform)`, and libraries look devices up that way. The process's own devices remain
`jax.local_devices(backend="cpu")`, which is how JAX itself and most libraries name them. docs/libraries.md compares the
libraries. With `ATOLL_CPU_DEVICES=script`, all lookups of "cpu" find the process's own devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.cluster.environment_variables import CPU_DEVICES, CpuDevices


def _of_the_cluster(lookup: Callable[..., Any]) -> Callable[..., Any]:
    from jax._src import xla_bridge

    def devices(backend: Any = None) -> Any:
        if backend == "cpu" and CPU_DEVICES.get() is not CpuDevices.SCRIPT:
            default = xla_bridge.get_backend()
            if default.platform == "cpu" and is_atoll(default):
                return lookup(default)
        return lookup(backend)

    return devices


def _of_this_process(lookup: Callable[..., Any]) -> Callable[..., Any]:
    from jax._src import xla_bridge

    def local_devices(process_index: Any = None, backend: Any = None, host_id: Any = None) -> Any:
        # JAX's function calls `devices`, which the patch does not change for a client.
        return lookup(process_index, xla_bridge.get_backend("cpu") if backend == "cpu" else backend, host_id)

    return local_devices


PATCH = Patch(
    name="devices by platform",
    enables='`jax.devices("cpu")` on a cluster of CPUs',
    changes=(
        *(
            Replacement("jax._src.xla_bridge", name, _of_the_cluster, ("backend",), copies=("jax",))
            for name in ("devices", "device_count", "local_device_count")
        ),
        Replacement(
            "jax._src.xla_bridge",
            "local_devices",
            _of_this_process,
            ("process_index", "backend", "host_id"),
            copies=("jax",),
        ),
    ),
)
