"""The local engine: all hosts are processes on this machine, children of the engine process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pkgutil import resolve_name

from atoll.cluster.processes.process import command
from atoll.cluster.settings import DEFAULT_PLATFORM
from atoll.devices.kinds import XLA, kind_of
from atoll.devices.membership import Membership
from atoll.engines.engine import HostProcess, HostStart
from atoll.engines.local_process import LocalProcess
from atoll.engines.options import EngineOptions
from atoll.wire.address import Address, parse_address
from atoll.worker.options import IslandOptions, WorkerOptions


class LocalEngine:
    """Starts workers as child processes; see `atoll.engines.engine.Engine`. Workers watch the engine's pid."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._kind = kind_of(options.settings.platform)
        if self._kind.check:
            resolve_name(self._kind.check)()  # raises SettingsError, which then reaches the user
        self._address = parse_address(options.controller_address)
        self._environment = worker_environment(options.settings.platform)

    def start_host(self, start: HostStart, on_end: Callable[[int], None]) -> HostProcess:
        return LocalProcess(self.command(start), self._environment, on_end)

    def command(self, start: HostStart) -> list[str]:
        """The command line of a host's worker."""
        make_options = self._island_options if self._kind.process_per_island else self._worker_options
        return command(self._kind.process, make_options(start))

    def _worker_options(self, start: HostStart) -> WorkerOptions:
        membership = None
        if start.hosts > 1:
            meeting = f"unix:{self._options.directory}/island-{start.island}-{start.incarnation}.sock"
            membership = Membership(meeting, start.rank, start.hosts, "127.0.0.1")
        return WorkerOptions(
            str(self._address),
            self._data_address(start.host),
            start.island,
            start.host,
            start.devices,
            os.getpid(),
            self._options.cache_directory,
            membership,
            self._options.settings.platform,
            self._options.has_one_client,
        )

    def _island_options(self, start: HostStart) -> IslandOptions:
        return IslandOptions(
            str(self._address),
            self._data_address("{host}"),
            start.island,
            start.host,
            start.hosts,
            start.devices,
            os.getpid(),
        )

    def _data_address(self, host: int | str) -> str:
        """Where a worker's data port listens: wherever the controller's clients can come from."""
        if self._address.is_local:
            return f"unix:{self._options.directory}/data-{host}.sock"
        return str(Address(host=self._address.host, port=0))


def worker_environment(platform: str) -> dict[str, str]:
    """A worker's environment: the user's, without what was meant for the user's own JAX."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "ATOLL_ISLANDS", "ATOLL_ADDRESS", "IFRT_PROXY_"))
    }
    flags = [f for f in env.get("XLA_FLAGS", "").split() if "xla_force_host_platform_device_count" not in f]
    env.pop("XLA_FLAGS", None)
    if flags:
        env["XLA_FLAGS"] = " ".join(flags)
    env["JAX_PLATFORMS"] = platform if kind_of(platform) is XLA else DEFAULT_PLATFORM
    env["JAX_ENABLE_X64"] = "1"
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return env
