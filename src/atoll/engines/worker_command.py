"""The command line and the environment of a host's worker, for all engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pkgutil import resolve_name

import msgspec

from atoll.cluster.directories import key_file, registry_directory, state_directory
from atoll.cluster.environment_variables import ADDRESS, JOIN, TENANTS_FILE
from atoll.cluster.processes.process_runtime import command, with_malloc_tuning
from atoll.cluster.sandbox.mechanisms import Mechanisms
from atoll.cluster.settings import DEFAULT_PLATFORM, SETTINGS, ClusterSettings
from atoll.devices.accelerators import visible
from atoll.devices.device_kinds import XLA, IslandMembership, kind_of
from atoll.devices.xla.time_limits import flags_without_limits
from atoll.engines.engine_interface import HostStart
from atoll.worker.worker_options import CONNECT_SECONDS, IslandOptions, WorkerOptions


class WorkerPlace(msgspec.Struct, frozen=True):
    """The options of a worker that depend on its machine."""

    controller: str  # address of the controller, as seen from the machine
    data_address: str  # address of the data port; {host} stands for the number of the host
    cache_directory: str
    advertise: str = ""  # host name at which others reach the data port; "" for that of `data_address`
    coordinator_address: str = ""  # of the island's coordination service
    hostname: str = "127.0.0.1"  # address at which collectives of other hosts reach this one
    has_one_client: bool = False
    directory: str = ""  # for the worker's files
    hidden: tuple[str, ...] = ()  # files of the cluster that users' Python must not see, besides those of `_state`
    sandbox: Mechanisms | None = None  # for users' Python on this machine
    connect_seconds: float = CONNECT_SECONDS  # for the controller, which may start at the same time


def check_kinds(settings: ClusterSettings) -> None:
    """Raise SettingsError if the environment asks for a feature that a kind of devices of the cluster lacks."""
    for platform in settings.topology.platforms:
        check_kind(platform)


def check_kind(platform: str) -> None:
    check = kind_of(platform).check
    if check:
        resolve_name(check)()


def worker_command(start: HostStart, place: WorkerPlace) -> list[str]:
    """Return the command line of a worker that is a child of this process and does not outlive it."""
    kind = kind_of(start.platform)
    if kind.process_per_island:
        return command(kind.process, island_options(start, place))
    membership = (
        IslandMembership(place.coordinator_address, start.rank, start.hosts, place.hostname)
        if start.hosts > 1
        else None
    )
    return command(
        kind.process,
        WorkerOptions(
            place.controller,
            place.data_address.replace("{host}", str(start.host)),
            start.island,
            start.host,
            start.devices,
            os.getpid(),
            place.cache_directory,
            membership,
            start.platform,
            place.has_one_client,
            place.advertise,
            start.incarnation,
            place.directory,
            _state(place),
            place.sandbox,
            place.hostname,
            start.among_islands,
            place.connect_seconds,
        ),
    )


def island_options(start: HostStart, place: WorkerPlace) -> IslandOptions:
    """Return the options of an island whose hosts share a process."""
    return IslandOptions(
        place.controller,
        place.data_address,
        start.island,
        start.host,
        start.hosts,
        start.devices,
        os.getpid(),
        place.advertise,
        start.incarnation,
        place.connect_seconds,
    )


def _state(place: WorkerPlace) -> tuple[str, ...]:
    """Return the files and directories of Atoll on this machine, which users' Python must never see.

    These are the registry of this user's clusters, the compiled programs with their key, usage, sessions on disk, the
    join token of this host, the file of tenants, and the files in `hidden`.
    """
    paths = (
        str(registry_directory()),
        place.cache_directory,
        key_file(),
        str(state_directory()),
        JOIN.text(),
        TENANTS_FILE.text(),
        *place.hidden,
    )
    return tuple(dict.fromkeys(os.path.abspath(each) for each in paths if os.path.isabs(each)))


def worker_environment(platform: str, names: Sequence[str] = (), count: int = 0) -> dict[str, str]:
    """Return a worker's environment: that of this process, without the settings for the user's own JAX.

    The worker sees the first `count` devices of `names`, if any.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", SETTINGS["islands"].variable, ADDRESS.variable, "IFRT_PROXY_"))
    }
    flags = [f for f in env.get("XLA_FLAGS", "").split() if "xla_force_host_platform_device_count" not in f]
    env["JAX_PLATFORMS"] = platform if kind_of(platform) is XLA else DEFAULT_PLATFORM
    env.pop("XLA_FLAGS", None)
    flags = flags_without_limits(env["JAX_PLATFORMS"], flags)
    if flags:
        env["XLA_FLAGS"] = " ".join(flags)
    env["JAX_ENABLE_X64"] = "1"
    env.update(visible(names, platform, count))
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return with_malloc_tuning(env)
