"""The registry of device kinds, by platform name.

A new kind is a file with a `DeviceBackend` (see `devices.device`) and one entry in `KINDS`. Entries name functions by
strings for `pkgutil.resolve_name`, so an engine does not import what only a worker's process may import.
"""

from __future__ import annotations

import msgspec

from atoll.cluster.environment_variables import PLUGINS
from atoll.cluster.settings import check_known


class DeviceKind(msgspec.Struct, frozen=True):
    """How to run hosts with devices of a platform. Functions are named as "module:function".

    `process` is the main module of a host's process, started with `WorkerOptions`. With `process_per_island`, it is
    the main module of one process for all hosts of an island, started with `IslandOptions`. `shared_process` is the
    main module of a process for several such islands, started with `SharedOptions` (see
    `atoll.engines.shared_process`).

    `backend(devices, cache_directory, membership)` creates the `DeviceBackend`, once per process of
    `atoll.worker.worker_main`. It blocks until the devices are ready. With an `IslandMembership`, the host joins the
    other hosts of its island. In a cluster with several islands, `among_islands(membership, directory)` is called
    before, with the worker's directory.

    The engine calls `check()` before it starts anything. It raises ClusterError for settings in the environment that
    the kind does not support.
    """

    backend: str = ""
    among_islands: str = ""
    process: str = "atoll.worker.worker_main"
    process_per_island: bool = False
    shared_process: str = ""
    check: str = ""


XLA = DeviceKind(
    backend="atoll.devices.xla.xla_backend:open_backend",
    among_islands="atoll.devices.xla.remote_device:prepare",
)

# By platform. XLA runs all other platforms.
KINDS: dict[str, DeviceKind] = {
    "null": DeviceKind(
        process="atoll.engines.null_hosts.null_hosts_main",
        process_per_island=True,
        shared_process="atoll.engines.null_hosts.null_islands_main",
        check="atoll.devices.null.model:chosen_model",
    ),
}


def kind_of(platform: str) -> DeviceKind:
    return KINDS.get(platform, XLA)


class IslandMembership(msgspec.Struct, frozen=True):
    """How a host joins the other hosts of its island: see `devices.xla.xla_island.join`."""

    address: str
    rank: int
    hosts: int
    hostname: str


# The names that JAX_PLATFORMS accepts ("gpu" is any kind of GPU), and those of Atoll's kinds.
KNOWN_PLATFORMS = ("cpu", "cuda", "gpu", "oneapi", "rocm", "tpu", *KINDS)

# JAX plug-ins that provide no platform besides the known ones.
_ORDINARY_PLUGINS = ("atoll", "xla_cuda", "xla_rocm")


def check_platform(text: str) -> None:
    """Raise SettingsError for an unknown platform. `text` may name several platforms, separated by commas.

    If a JAX plug-in for other hardware is installed, any name is accepted: only the plug-in knows its platform's name.
    """
    unknown = [name for name in text.split(",") if name not in KNOWN_PLATFORMS]
    if unknown and not _has_other_plugins():
        check_known("platform", unknown[0], KNOWN_PLATFORMS)


def _has_other_plugins() -> bool:
    import importlib.metadata  # takes long, and no process of a cluster needs it

    names = [entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")]
    return bool(PLUGINS.text()) or not all(name.startswith(_ORDINARY_PLUGINS) for name in names)
