"""A process of several islands of null devices, which the engine starts and ends one by one."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `run_loop`, since the objects of modules are permanent

import asyncio
import logging
import os
import socket
from functools import partial

from atoll.cluster.processes.lifeline import watch_in_thread
from atoll.cluster.processes.process_logging import start_logging
from atoll.cluster.processes.process_runtime import freeze_gc, read_options, run_loop
from atoll.cluster.processes.startup_heartbeat import StartupHeartbeat
from atoll.engines.null_hosts.null_island import NullIsland, NullProcess, hosts_of, raise_limits
from atoll.engines.shared_islands import EndIsland, IslandEnded, Lines, SharedOptions, StartIsland, line
from atoll.errors import AtollError
from atoll.worker.worker_options import IslandOptions

_log = logging.getLogger(__name__)

_FAILED = 1  # the status of an island that could not be started


class NullIslands:
    """The islands of this process. `stop` is set when the engine closes its end of the socket, or ends."""

    def __init__(self, engine: socket.socket, process: NullProcess, stop: asyncio.Event) -> None:
        self._engine = engine
        self._process = process
        self._stop = stop
        self._lines = Lines()
        self._islands: dict[int, asyncio.Task[int]] = {}
        self._starting = asyncio.Lock()  # the controller limits the connections that have not said who they are
        process.loop.add_reader(engine, self._read)

    def _read(self) -> None:
        try:
            data = self._engine.recv(1 << 16)
        except OSError:  # the engine has ended before it read what was sent to it
            data = b""
        if not data:
            self._engine_left()
        for message in self._lines.messages(data):
            if isinstance(message, StartIsland):
                self._start(message.options)
            elif isinstance(message, EndIsland) and message.island in self._islands:
                self._islands[message.island].cancel()

    def _engine_left(self) -> None:
        self._process.loop.remove_reader(self._engine)
        self._stop.set()

    def _start(self, options: IslandOptions) -> None:
        task = self._islands[options.island] = self._process.loop.create_task(self._run(options))
        task.add_done_callback(partial(self._ended, options.island))

    async def _run(self, options: IslandOptions) -> int:
        """Run an island to its end. Return its exit status."""
        stop = asyncio.Event()
        island = NullIsland(options, self._process, stop)
        try:
            async with self._starting:
                await island.start()
            freeze_gc()
            await stop.wait()
        except (AtollError, OSError) as error:
            _log.error("%s fail: %s", hosts_of(options), error)
            return _FAILED
        finally:
            island.close()
        return 0

    def _ended(self, island: int, task: asyncio.Task[int]) -> None:
        del self._islands[island]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._process.bugs.end(error)
        try:
            self._engine.sendall(line(IslandEnded(island, 0 if task.cancelled() else task.result())))
        except OSError:
            self._engine_left()


async def serve(options: SharedOptions, signs: StartupHeartbeat, stop: asyncio.Event) -> None:
    engine = socket.socket(fileno=options.descriptor)
    engine.set_inheritable(False)
    NullIslands(engine, NullProcess.open("a process of null islands", stop.set), stop)
    signs.ready()
    freeze_gc()
    await stop.wait()


def main() -> None:
    options = read_options(SharedOptions)
    signs = StartupHeartbeat.of_arguments()
    start_logging("null islands")
    watch_in_thread(options.parent, lambda: os._exit(0))
    raise_limits()
    run_loop(partial(serve, options, signs))
    os._exit(0)


if __name__ == "__main__":
    main()
