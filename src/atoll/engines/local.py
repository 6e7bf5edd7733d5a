"""The local engine, whose hosts are child processes of the engine process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.cluster.processes.child import describe_exit
from atoll.cluster.processes.machine_memory import machine_memory
from atoll.cluster.processes.oom_kills import OomKills
from atoll.cluster.processes.startup_heartbeat import StartingProcess
from atoll.cluster.sandbox.isolation import mechanisms_here
from atoll.cluster.settings import OnOff
from atoll.cluster.topology import Topology
from atoll.devices.accelerators import DeviceShares, devices
from atoll.devices.device_kinds import kind_of
from atoll.engines.engine_interface import AgentHandler, HostEnd, HostProcess, HostStart
from atoll.engines.engine_options import EngineOptions
from atoll.engines.shared_process import MAX_PROCESSES, SharedProcesses
from atoll.engines.worker_command import (
    WorkerPlace,
    check_kinds,
    island_options,
    worker_command,
    worker_environment,
)
from atoll.errors import ClusterError
from atoll.quantities import counted, human_bytes
from atoll.wire.address import Address, parse_address

# The memory of an idle worker, without the pages that it shares with other processes.
_WORKER_BYTES, _DEVICE_BYTES = 60 << 20, 288 << 10


class LocalEngine:
    """The engine that starts workers as child processes."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        check_kinds(options.settings)
        self._address = self._controller = parse_address(options.controller_address)
        self._shares = DeviceShares(devices())
        shares_processes = options.settings.topology.islands > MAX_PROCESSES
        self._processes = {
            platform: SharedProcesses(kind_of(platform).shared_process, options.settings.lease_seconds)
            for platform in options.settings.topology.platforms
            if shares_processes and kind_of(platform).shared_process
        }
        for platform in options.settings.topology.platforms:
            shapes = [each for each in options.settings.topology.shapes if each.platform == platform]
            self._shares.check(platform, sum(each.hosts * each.devices for each in shapes))
        _check_memory(options.settings.topology)

    @property
    def agents(self) -> AgentHandler | None:
        return None

    def place(self, island: int, starts: Sequence[HostStart], then: Callable[[Sequence[str]], None]) -> None:
        then(())

    def cancel(self, island: int) -> None:
        """Do nothing: no island waits for machines."""

    def release(self, island: int) -> None:
        """Do nothing: islands hold no machines."""

    def controller_at(self, address: Address) -> None:
        self._controller = address

    async def close(self) -> None:
        """Do nothing: all processes have ended."""

    def start_host(self, start: HostStart, on_end: Callable[[HostEnd], None]) -> HostProcess:
        names = self._shares.take(start.platform, start.devices)
        kills = OomKills()

        def ended(status: int, silence: str) -> None:
            self._shares.give_back(start.platform, names)
            text = silence or describe_exit(status) + kills.note(status)
            on_end(HostEnd(status, text, hung=bool(silence)))

        environment = worker_environment(start.platform, names, start.devices)
        shared = self._processes.get(start.platform)
        try:
            if shared is not None:
                return shared.start(island_options(start, self._place(start)), environment, ended)
            return StartingProcess(self.command(start), environment, ended, self._options.settings.lease_seconds)
        except OSError:
            self._shares.give_back(start.platform, names)
            raise

    def command(self, start: HostStart) -> list[str]:
        """Return the command line of a host's worker."""
        return worker_command(start, self._place(start))

    def _place(self, start: HostStart) -> WorkerPlace:
        return WorkerPlace(
            str(self._controller),
            self._data_address(),
            self._options.cache_directory,
            coordinator_address=f"unix:{self._options.directory}/island-{start.island}-{start.incarnation}.sock",
            has_one_client=self._options.has_one_client,
            directory=self._options.directory,
            hidden=(self._options.journal, self._options.settings.suspend_directory),
            sandbox=None if self._options.has_one_client else mechanisms_here(),
            connect_seconds=self._options.settings.start_seconds,
        )

    def _data_address(self) -> str:
        """Return the address for data ports, which clients of the controller must be able to reach."""
        if self._address.is_local:
            return f"unix:{self._options.directory}/data-{{host}}.sock"
        bulk = Address(host=self._address.host)
        is_secured = self._address.tls and self._options.settings.bulk_tls is OnOff.ON
        return str(bulk.secured() if is_secured else bulk)


def _check_memory(topology: Topology) -> None:
    """Raise ClusterError if this machine has too little memory for one worker per host."""
    shapes = [each for each in topology.shapes if not kind_of(each.platform).process_per_island]
    hosts = sum(each.hosts for each in shapes)
    needed = hosts * _WORKER_BYTES + sum(each.hosts * each.devices for each in shapes) * _DEVICE_BYTES
    if needed > machine_memory():
        raise ClusterError(
            f"the workers of {counted(hosts, 'host')} need at least {human_bytes(needed)} of memory, and this machine "
            f"has {human_bytes(machine_memory())}: use fewer hosts or devices, or `--engine hosts` on several machines"
        )
