"""The worker process of a host agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from atoll.cluster.directories import make_directory, remove_tree
from atoll.cluster.processes.child import describe_exit
from atoll.cluster.processes.client_directories import HOST_DIRECTORIES, claim
from atoll.cluster.processes.oom_kills import OomKills
from atoll.cluster.processes.startup_heartbeat import StartingProcess
from atoll.engines.engine_interface import HostStart
from atoll.engines.restart_rules import MAX_RESTARTS, RESTART_SPAN_SECONDS
from atoll.engines.worker_command import WorkerPlace, worker_command, worker_environment
from atoll.errors import ClusterError
from atoll.protocol import messages as m
from atoll.wire.address import Address

_REPORT_SECONDS = RESTART_SPAN_SECONDS / MAX_RESTARTS  # until the report that a worker could not be started


class LocalWorker:
    """At most one worker process, with its own directory. All methods are called on the event loop.

    `devices` names this machine's devices by platform. `on_ready()` is called when a worker has opened its devices and
    has connected to the controller. Each time a worker has ended, `last_end` is set and `on_end(reason)` is called; the
    reason is "" if the exit status says all. Both are called on the event loop.
    """

    def __init__(
        self, devices: Mapping[str, tuple[str, ...]], on_ready: Callable[[], None], on_end: Callable[[str], None]
    ) -> None:
        self._devices = devices
        self._on_ready = on_ready
        self._on_end = on_end
        self._process: StartingProcess | None = None
        self._directory: Path | None = None
        self._looks_at: frozenset[Address] = frozenset()  # addresses at which a starting worker looks for a controller
        self._kills = OomKills()  # since the worker's start
        self._problem = ""  # why the worker could not be started
        self._report: asyncio.TimerHandle | None = None  # of that problem
        self._none = asyncio.Event()
        self._none.set()
        self.incarnation = 0  # 0 without a worker
        self.last_end = (0, 0)  # incarnation, status

    @property
    def runs(self) -> bool:
        """Return whether there is a worker, even if it is still starting."""
        return self._process is not None

    def start(self, start: m.StartWorker, place: WorkerPlace, controllers: Iterable[Address]) -> None:
        """Start a worker in a new directory. It looks for its controller at `controllers`."""
        self._looks_at = frozenset(controllers)
        host = HostStart(
            start.island,
            start.host,
            start.rank,
            start.hosts,
            start.devices,
            start.incarnation,
            start.platform,
            start.among_islands,
        )
        self.incarnation = start.incarnation
        self._none.clear()
        self._kills = OomKills()
        try:
            self._directory = make_directory(HOST_DIRECTORIES)
            claim(self._directory, self._directory)
            command = worker_command(host, replace(place, directory=str(self._directory)))
            environment = worker_environment(start.platform, self._devices.get(start.platform, ()), start.devices)
            self._process = StartingProcess(command, environment, self._ended, start.lease, on_ready=self._on_ready)
        except (ClusterError, OSError) as error:
            # Report it later, so that the engine does not use up its restarts while files or memory are lacking.
            self._problem = f"it cannot be started: {error}"
            self._report = asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._has_not_started)

    def _has_not_started(self) -> None:
        if self._report is not None:
            self._report.cancel()
            self._report = None
            self._ended(1, self._problem)

    def controller_is_at(self, *addresses: Address) -> None:
        """End a starting worker if it knows none of these addresses: it could not find its controller."""
        if self._process is not None and self._looks_at.isdisjoint(addresses):
            self._process.give_up(f"the controller is now at {addresses[0]}, an address that it does not know")

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()
        self._has_not_started()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._has_not_started()

    async def end(self, seconds: float) -> None:
        """Wait for the worker to end, since the controller may be ending it, and kill it after `seconds`."""
        try:
            await asyncio.wait_for(self._none.wait(), seconds)
        except TimeoutError:
            self.kill()
            await self._none.wait()

    def _ended(self, status: int, reason: str) -> None:
        reason = reason or describe_exit(status) + self._kills.note(status)
        if self._directory is not None:
            remove_tree(self._directory)
        self.last_end = self.incarnation, status
        self._process, self.incarnation = None, 0
        self._none.set()
        self._on_end(reason)
