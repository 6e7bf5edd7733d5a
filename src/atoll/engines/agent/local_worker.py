"""The worker of a host agent: at most one process, in its own directory, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from atoll.cluster.processes.client_directories import HOST_DIRECTORIES, claim
from atoll.cluster.processes.local_process import describe_exit
from atoll.cluster.processes.startup_heartbeat import StartingProcess
from atoll.engines.engine_interface import HostStart
from atoll.engines.engine_options import make_directory
from atoll.engines.worker_command import WorkerPlace, worker_command, worker_environment
from atoll.protocol import messages as m
from atoll.wire.address import Address

_log = logging.getLogger(__name__)


class LocalWorker:
    """`on_end(reason)` is called on the event loop whenever a worker has ended; `last_end` says which, and how.

    `devices` names this machine's devices by platform. All is done on the event loop.
    """

    def __init__(self, devices: Mapping[str, tuple[str, ...]], on_end: Callable[[str], None]) -> None:
        self._devices = devices
        self._on_end = on_end
        self._process: StartingProcess | None = None
        self._directory: Path | None = None
        self._looks_at: frozenset[Address] = frozenset()  # for a controller, while it starts
        self._none = asyncio.Event()
        self._none.set()
        self.incarnation = 0  # 0 where there is none
        self.last_end = (0, 0)  # incarnation, status

    @property
    def runs(self) -> bool:
        """Whether there is one, be it that it still starts."""
        return self._process is not None

    def start(self, start: m.StartWorker, place: WorkerPlace, controllers: Iterable[Address]) -> None:
        """Start a worker in a directory that is made here. It looks for its controller at `controllers`."""
        self._directory = make_directory(HOST_DIRECTORIES)
        claim(self._directory, self._directory)
        self._looks_at = frozenset(controllers)
        host = HostStart(
            start.island, start.host, start.rank, start.hosts, start.devices, start.incarnation, start.platform
        )
        self.incarnation = start.incarnation
        self._none.clear()
        try:
            command = worker_command(host, replace(place, directory=str(self._directory)))
            environment = worker_environment(start.platform, self._devices.get(start.platform, ()), start.devices)
            self._process = StartingProcess(command, environment, self._ended, start.lease)
        except OSError as error:
            self._ended(1, f"it cannot be started: {error}")

    def controller_is_at(self, *addresses: Address) -> None:
        """One that starts knows the controllers of when it began, of which none may be there any more: it is ended."""
        if self._process is not None and self._looks_at.isdisjoint(addresses):
            self._process.give_up(f"the controller is at {addresses[0]} now, where it would not have looked for it")

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def end(self, seconds: float) -> None:
        """The controller may be ending it, too, in good order: it is given the time. Returns when there is none."""
        try:
            await asyncio.wait_for(self._none.wait(), seconds)
        except TimeoutError:
            self.kill()
            await self._none.wait()

    def _ended(self, status: int, reason: str) -> None:
        _log.info("the worker of incarnation %d has ended: %s", self.incarnation, reason or describe_exit(status))
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self.last_end = self.incarnation, status
        self._process, self.incarnation = None, 0
        self._none.set()
        self._on_end(reason)
