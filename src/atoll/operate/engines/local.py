"""The local engine: a cluster of processes on this machine.

It starts the controller and one worker a host, ends when told to, when a process that it must not outlive has
ended, or when the controller has; and takes everything with it: processes, sockets, folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import sys
from functools import partial
from typing import Any

import msgspec

from atoll._version import __version__
from atoll.cluster.settings import DEFAULT_PLATFORM
from atoll.cluster.topology import read_topology
from atoll.controller.options import ControllerOptions
from atoll.errors import AtollError, ClusterError
from atoll.operate.engines.island import Island, describe, start
from atoll.operate.engines.options import EngineOptions, Started
from atoll.processes.lifeline import watch_in_loop
from atoll.processes.process import end, read_options, run_loop, start_logging, write_ready
from atoll.protocol.messages import (
    DEFAULT_TOKEN_VARIABLE,
    PROTOCOL,
    EndIsland,
    Hello,
    IslandEnded,
    IslandGivenUp,
    RestartIsland,
    StartIsland,
    ToEngine,
    WorkerEnded,
)
from atoll.wire.address import Address, check_may_listen, parse_address
from atoll.wire.connection import Connection, connect
from atoll.worker.kinds import XLA, kind_of, named
from atoll.worker.options import IslandOptions, Membership, WorkerOptions

_log = logging.getLogger(__name__)

READY_SECONDS = 120.0
_END_SECONDS = 1.0


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


class LocalEngine:
    """Starts, watches and ends the processes of one cluster."""

    def __init__(self, options: EngineOptions, stop: asyncio.Event) -> None:
        self.options = options
        self.stop = stop
        self.topology = read_topology(options.settings.islands, options.settings.mesh)
        self.kind = kind_of(options.settings.platform)
        if self.kind.check:
            named(self.kind.check)()  # raises ClusterError here, where the user sees it
        self.address = parse_address(options.controller_address)
        self.controller: subprocess.Popen[bytes] | None = None
        self._environment = worker_environment(options.settings.platform)
        self.islands = [self._island(number) for number in range(self.topology.islands)]
        self._link: Connection | None = None
        self._first_death = ""

    def _island(self, number: int) -> Island:
        hosts = self.topology.hosts
        return Island(
            range(number * hosts, (number + 1) * hosts),
            partial(self._workers, number),
            self._environment,
            self._worker_ended,
            partial(self._given_up, number),
        )

    def start(self) -> int:
        """Starts all processes; returns a descriptor that tells when the controller has everything it needs."""
        check_may_listen(self.address, os.environ.get(DEFAULT_TOKEN_VARIABLE, ""))
        readable, writable = os.pipe()
        controller = ControllerOptions(str(self.address), self.options.settings, os.getpid(), writable)
        self.controller = start("atoll.controller.main", controller, os.environ.copy(), (writable,))
        os.close(writable)
        watch_in_loop(self.controller.pid, self.stop.set)
        for island in self.islands:
            island.start()
        return readable

    def _workers(self, island: int, incarnation: int) -> list[tuple[int, str, msgspec.Struct]]:
        count = self.topology.hosts
        if self.kind.process_per_island:
            return [(island * count, self.kind.process, self._island_options(island))]
        meeting = f"unix:{self.options.directory}/island-{island}-{incarnation}.sock"
        return [
            (
                host,
                self.kind.process,
                WorkerOptions(
                    str(self.address),
                    self._data_address(host),
                    island,
                    host,
                    self.topology.devices,
                    os.getpid(),
                    self.options.cache_directory,
                    Membership(meeting, rank, count, "127.0.0.1") if count > 1 else None,
                    self.options.settings.platform,
                ),
            )
            for rank, host in enumerate(range(island * count, (island + 1) * count))
        ]

    def _island_options(self, island: int) -> IslandOptions:
        count = self.topology.hosts
        return IslandOptions(
            str(self.address),
            self._data_address("{host}"),
            island,
            island * count,
            count,
            self.topology.devices,
            os.getpid(),
        )

    def _data_address(self, host: int | str) -> str:
        """Where a worker's data port listens: wherever the controller's clients can come from."""
        if self.address.is_local:
            return f"unix:{self.options.directory}/data-{host}.sock"
        return str(Address(host=self.address.host, port=0))

    async def connect(self) -> None:
        """All is up. Opens the line on which the controller hears of ended workers, and has islands restarted."""
        for island in self.islands:
            island.restarts_itself = True
        self._link = await connect(
            self.address, ToEngine, self._message, lambda _: self.stop.set(), name="the controller"
        )
        token = os.environ.get(DEFAULT_TOKEN_VARIABLE, "")
        self._link.send(Hello(PROTOCOL, "engine", token, os.getpid(), __version__))

    def _message(self, message: Any) -> None:
        match message:
            case RestartIsland(island=island, reason=reason):
                _log.warning("island %d is restarted: %s", island, reason)
                self.islands[island].restart()
            case StartIsland(island=island) if island == len(self.islands):
                self.islands.append(self._island(island))
                self.islands[island].restarts_itself = True
                self.islands[island].start()
            case EndIsland(island=island):
                self.islands[island].end(_END_SECONDS)
                if self._link is not None:
                    self._link.send(IslandEnded(island))

    def _worker_ended(self, host: int, pid: int, status: int) -> None:
        self._first_death = self._first_death or f"the worker of host {host} ended: {describe(status)}"
        if self._link is not None:
            self._link.send(WorkerEnded(host, pid, status, describe(status)))

    def _given_up(self, island: int, text: str) -> None:
        if self._link is not None:
            self._link.send(IslandGivenUp(island, text))

    def first_death(self) -> str:
        """Which process has ended already, or ""."""
        assert self.controller is not None
        status = self.controller.poll()
        return self._first_death or (f"the controller ended: {describe(status)}" if status is not None else "")

    def end(self) -> None:
        """Ends all processes.

        The controller goes first: it tells its workers to end, so that none looks lost.
        """
        if self._link is not None:
            self._link.close()
        if self.controller is not None:
            end(self.controller, _END_SECONDS)
        for island in self.islands:
            island.end(_END_SECONDS)


async def serve(options: EngineOptions, stop: asyncio.Event) -> None:
    if options.parent:
        watch_in_loop(options.parent, stop.set)
    engine: LocalEngine | None = None
    try:
        engine = LocalEngine(options, stop)
        ready = engine.start()
        await _until_ready(engine, ready, stop)
        if not stop.is_set():
            await engine.connect()
        write_ready(options.ready_fd, Started(address=options.controller_address))
        await stop.wait()
    except AtollError as error:
        write_ready(options.ready_fd, Started(error=str(error)))
    finally:
        if engine is not None:
            engine.end()
        for folder in (options.directory, *options.client_directories):
            shutil.rmtree(folder, ignore_errors=True)


async def _until_ready(engine: LocalEngine, descriptor: int, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        async with asyncio.timeout(READY_SECONDS):
            while not readable.is_set() and not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(readable.wait(), 0.2)
                death = engine.first_death()
                if death:
                    raise ClusterError(f"the cluster did not start: {death}; its messages are above")
    except TimeoutError:
        raise ClusterError(f"the cluster was not up within {READY_SECONDS:.0f} s") from None
    finally:
        loop.remove_reader(descriptor)
    if not os.read(descriptor, 64) and not stop.is_set():
        raise ClusterError("the controller ended before the cluster was up; its messages are above")
    os.close(descriptor)


def main() -> None:
    options = read_options(EngineOptions)
    start_logging("engine")
    run_loop(lambda stop: serve(options, stop))
    sys.exit(0)


if __name__ == "__main__":
    main()
