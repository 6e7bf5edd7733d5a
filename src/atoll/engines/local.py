"""The local engine: a cluster of processes on this machine.

It starts the controller and one worker a host, ends when told to, when a process that it must not outlive has
ended, or when the controller has; and takes everything with it: processes, sockets, folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from atoll.controller.main import ControllerOptions
from atoll.controller.resources import Topology
from atoll.errors import AtollError, ClusterError
from atoll.transport.address import Address, check_may_listen, parse_address
from atoll.transport.lifeline import watch_in_loop
from atoll.transport.messages import DEFAULT_TOKEN_VARIABLE
from atoll.transport.process import command, read_options, run_loop, start_logging, tell
from atoll.worker.main import WorkerOptions

READY_SECONDS = 120.0
_END_SECONDS = 1.0


class EngineOptions(msgspec.Struct, frozen=True):
    """How to start a cluster. `parent` 0: it stays until it is told to end."""

    topology: str
    directory: str
    listen: str = ""  # of the controller; "": a socket in `directory`
    platform: str = "cpu"
    parent: int = 0
    cache_directory: str = ""
    ready_fd: int = -1
    max_sessions: int = 256
    client_directories: tuple[str, ...] = ()  # of its client, which the proxy removes unless it was killed

    @property
    def controller_address(self) -> str:
        return self.listen or f"unix:{self.directory}/controller.sock"


class Started(msgspec.Struct, frozen=True):
    """What the engine says once the cluster is up, or is not."""

    address: str = ""
    error: str = ""


def make_directory(kind: str) -> Path:
    """A fresh private folder for a cluster's sockets, in $XDG_RUNTIME_DIR or the system's temporary folder."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix=f"atoll-{kind}-", dir=base))


def default_cache_directory(wanted: str = "") -> str:
    """Where compiled programs are kept: $ATOLL_CACHE_DIR ("off" keeps none), or `wanted`, or a folder of the user's."""
    chosen = os.environ.get("ATOLL_CACHE_DIR", "")
    if chosen == "off":
        return ""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return chosen or wanted or str(base / "atoll" / "programs")


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
    env["JAX_PLATFORMS"] = platform
    env["JAX_ENABLE_X64"] = "1"
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return env


def read_topology(text: str) -> Topology:
    """The topology of a cluster that this engine can start. Raises ClusterError for any other."""
    try:
        topology = Topology.parse(text)
    except ValueError as error:
        raise ClusterError(str(error)) from None
    if topology.hosts != 1:
        raise ClusterError(
            f"{text}: an island of {topology.hosts} hosts cannot be started yet: take 1 host with "
            f"{topology.hosts * topology.devices} devices, such as "
            f"{topology.islands}x1x{topology.hosts * topology.devices}"
        )
    return topology


class LocalEngine:
    """Starts, watches and ends the processes of one cluster."""

    def __init__(self, options: EngineOptions, stop: asyncio.Event) -> None:
        self.options = options
        self.stop = stop
        self.topology = read_topology(options.topology)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.modules: dict[int, str] = {}

    def start(self) -> int:
        """Starts all processes; returns a descriptor that tells when the controller has everything it needs."""
        options = self.options
        address = parse_address(options.controller_address)
        check_may_listen(address, os.environ.get(DEFAULT_TOKEN_VARIABLE, ""))
        readable, writable = os.pipe()
        me = os.getpid()
        controller = ControllerOptions(
            str(address), options.topology, me, options.max_sessions, ready_fd=writable
        )
        self._start("atoll.controller.main", controller, os.environ.copy(), (writable,))
        os.close(writable)
        env = worker_environment(options.platform)
        for host in range(self.topology.host_count):
            worker = WorkerOptions(
                str(address),
                self._data_address(address, host),
                self.topology.island_of(host),
                host,
                self.topology.devices,
                me,
                options.cache_directory,
            )
            self._start("atoll.worker.main", worker, env, ())
        watch_in_loop(self.processes[0].pid, self.stop.set)
        return readable

    def _data_address(self, controller: Address, host: int) -> str:
        """Where a worker's data port listens: wherever the controller's clients can come from."""
        if controller.is_local:
            return f"unix:{self.options.directory}/data-{host}.sock"
        return str(Address(host=controller.host, port=0))

    def _start(
        self, module: str, options: msgspec.Struct, env: dict[str, str], descriptors: tuple[int, ...]
    ) -> None:
        process = subprocess.Popen(
            command(module, options), stdin=subprocess.DEVNULL, env=env, pass_fds=descriptors
        )
        self.processes.append(process)
        self.modules[process.pid] = module

    def first_death(self) -> str:
        """Which process has ended already, or ""."""
        for process in self.processes:
            if process.poll() is not None:
                module = self.modules[process.pid]
                return f"{module} ended with status {process.returncode}"
        return ""

    def end(self) -> None:
        """Ends all processes, by force where they do not go.

        The controller goes first: it tells its workers to end, so that none looks lost.
        """
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def serve(options: EngineOptions, stop: asyncio.Event) -> None:
    if options.parent:
        watch_in_loop(options.parent, stop.set)
    engine: LocalEngine | None = None
    try:
        engine = LocalEngine(options, stop)
        ready = engine.start()
        await _until_ready(engine, ready, stop)
        tell(options.ready_fd, Started(address=options.controller_address))
        await stop.wait()
    except AtollError as error:
        tell(options.ready_fd, Started(error=str(error)))
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
