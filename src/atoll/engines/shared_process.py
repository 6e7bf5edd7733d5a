"""Processes for several islands each, for kinds of devices whose islands need no process of their own.

A cluster of a few islands has a process per island. If there are more islands, each process has several, since hundreds
of processes would take minutes to start. An island still starts, ends and restarts by itself. If its process ends, the
other islands of this process fail with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial

from atoll.cluster.processes.process_runtime import command
from atoll.cluster.processes.startup_heartbeat import StartingProcess
from atoll.engines.shared_islands import EndIsland, IslandEnded, Lines, SharedOptions, StartIsland, line
from atoll.worker.worker_options import IslandOptions

MAX_PROCESSES = 16  # of a cluster

OnEnd = Callable[[int, str], None]  # as for `StartingProcess`


class SharedProcesses:
    """Starts islands in at most `MAX_PROCESSES` processes.

    Args:
        module: the main module of the processes.
        seconds: the time in which a process that starts must show progress.
        end_seconds: the time in which a process must end an island by force; otherwise it is killed.
    """

    def __init__(self, module: str, seconds: float, end_seconds: float = 5.0) -> None:
        self._module = module
        self._seconds = seconds
        self._end_seconds = end_seconds
        self._processes: dict[int, SharedProcess] = {}

    def start(self, options: IslandOptions, environment: Mapping[str, str], on_end: OnEnd) -> IslandHandle:
        """Start an island. `on_end` is as for `StartingProcess`. Raise OSError if its process cannot be started."""
        number = options.island % MAX_PROCESSES
        process = self._processes.get(number)
        if process is None or process.is_over:
            process = self._processes[number] = SharedProcess(
                self._module, environment, self._seconds, self._end_seconds
            )
        return process.start(options, on_end)


class SharedProcess:
    """A process for several islands. It ends when it has none any more."""

    def __init__(self, module: str, environment: Mapping[str, str], seconds: float, end_seconds: float) -> None:
        self._end_seconds = end_seconds
        self.is_over = False  # it takes no more islands
        self._islands: dict[int, OnEnd] = {}
        self._lines = Lines()
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        with theirs:
            options = SharedOptions(os.getpid(), theirs.fileno())
            try:
                self._process = StartingProcess(
                    command(module, options), environment, self._ended, seconds, (theirs.fileno(),)
                )
            except BaseException:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)

    def start(self, options: IslandOptions, on_end: OnEnd) -> IslandHandle:
        self._islands[options.island] = on_end
        self._send(StartIsland(options))
        return IslandHandle(self, options.island, on_end)

    def end(self, island: int, on_end: OnEnd, *, by_force: bool) -> None:
        """End an island that was started with `on_end`, and the whole process if it does not end the island soon."""
        if self._islands.get(island) is not on_end:
            return
        if by_force and len(self._islands) == 1:
            self._process.kill()
            return
        self._send(EndIsland(island))
        if by_force:
            self._loop.call_later(self._end_seconds, partial(self._kill_with, island, on_end))

    def _kill_with(self, island: int, on_end: OnEnd) -> None:
        if self._islands.get(island) is on_end:
            self._process.kill()

    def _send(self, message: StartIsland | EndIsland) -> None:
        content, sent = line(message), 0
        with contextlib.suppress(OSError):  # the process does not read, or has ended
            sent = self._socket.send(content)
        if sent < len(content):
            self._process.kill()

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:  # `_ended` is called next
            self._close()
        for message in self._lines.messages(data):
            assert isinstance(message, IslandEnded)
            on_end = self._islands.pop(message.island)
            if not self._islands:
                self._close()
            on_end(message.status, "")

    def _close(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _ended(self, status: int, silence: str) -> None:
        self._close()
        islands, self._islands = self._islands, {}
        for on_end in islands.values():
            on_end(status, silence)


class IslandHandle:
    """An island in a shared process: a `HostProcess`."""

    def __init__(self, process: SharedProcess, island: int, on_end: OnEnd) -> None:
        self._process = process
        self._island = island
        self._on_end = on_end

    def terminate(self) -> None:
        self._process.end(self._island, self._on_end, by_force=False)

    def kill(self) -> None:
        self._process.end(self._island, self._on_end, by_force=True)
