"""The registry of device kinds: a platform's name, and what runs it.

A new kind is a file with a `DeviceBackend` (see `devices.device`) and one entry of `KINDS`. All is named by strings for
`pkgutil.resolve_name`, so that an engine can ask here without importing what only a worker's process may import.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceKind:
    """How hosts with devices of a platform are run. Functions are named as "module:function".

    `process` is the module of a host's process, started with `WorkerOptions`; or, with `process_per_island`, that of
    all hosts of an island, started with `IslandOptions`.

    `backend(devices, cache_directory, membership)` makes the `DeviceBackend` in a process of
    `atoll.worker.worker_main`, once, and may take as long as the devices need to come up. With a `Membership` the host
    joins the others of its island.

    `check()` is called before anything is started, in the engine; it raises ClusterError where the environment asks for
    what the kind does not have.
    """

    backend: str = ""
    process: str = "atoll.worker.worker_main"
    process_per_island: bool = False
    check: str = ""


XLA = DeviceKind(backend="atoll.devices.xla.start_xla:open_backend")

# By platform. All other platforms are JAX's, and XLA runs them.
KINDS: dict[str, DeviceKind] = {
    "null": DeviceKind(
        process="atoll.engines.null_hosts.null_hosts_main",
        process_per_island=True,
        check="atoll.devices.null.model:chosen_model",
    ),
}


def kind_of(platform: str) -> DeviceKind:
    return KINDS.get(platform, XLA)
