"""Run the command `atoll` like a user, in real processes, with a runtime directory of the test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pytest

from atoll.cluster.processes.client_directories import sweep
from tests.lines import next_line
from tests.process_environments import processes_with
from tests.scripts import ScriptResult, start_process

COMMAND = [sys.executable, "-m", "atoll.operate.command"]
DEADLINE = 300.0  # seconds per command


@dataclass(frozen=True)
class Result(ScriptResult):
    """Result of a command."""

    @property
    def error(self) -> str:
        """Return its one-line error message. Fail the test unless it failed with no output."""
        assert self.returncode in (1, 78), f"status {self.returncode}\n{self.stdout}\n{self.stderr}"
        assert not self.stdout, self.stdout
        assert self.stderr.count("\n") == 1, self.stderr
        return self.stderr.strip()


class User:
    """User with a runtime directory and an environment, but no cluster.

    At the end of the context, all processes that use the directory are killed.
    """

    def __init__(self, runtime: Path, program_cache: Path, **env: str) -> None:
        self.runtime = runtime
        settings = ("JAX_", "ATOLL_ISLANDS", "ATOLL_ADDRESS", "ATOLL_TOKEN", "ATOLL_PLATFORM", "IFRT_PROXY_")
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(settings) and name != "NPROC"
        }
        self.env.update(XDG_RUNTIME_DIR=str(runtime), TMPDIR=str(runtime), ATOLL_CACHE_DIR=str(program_cache))
        self.env |= env
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for started in self._started:
            if started.returncode is None:  # a test that passes has waited for all of its processes
                started.kill()
                started.communicate()
        eventually(lambda: not self.processes())
        sweep(self.runtime)  # a killed proxy may have left its client's directories

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a command in a new process group."""
        self._started.append(start_process(command, self.env | env, self.runtime))
        return self._started[-1]

    def start_atoll(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return self.start(*COMMAND, *arguments, **env)

    def atoll(self, *arguments: str, **env: str) -> Result:
        """Run `atoll`, and return its result."""
        return finish(self.start_atoll(*arguments, **env))

    def script(self, code: str, **env: str) -> Result:
        """Run a Python script, and wait for its end and for that of its proxy. Only `env` selects the cluster."""
        process = self.start(sys.executable, "-c", textwrap.dedent(code), **env)
        ended = finish(process)
        its = f'"client":{process.pid},'  # from ProxyOptions
        assert eventually(lambda: not any(its in each for each in self.commands().values())), "its proxy does not end"
        return ended

    def processes(self) -> list[psutil.Process]:
        """Return the live processes that have this runtime directory in their environment."""
        return processes_with("XDG_RUNTIME_DIR", str(self.runtime))

    def commands(self) -> dict[psutil.Process, str]:
        """Return the processes with their command lines."""
        found = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                found[process] = " ".join(process.cmdline())
        return found

    def process(self, module: str) -> psutil.Process:
        """Return the user's only process that runs `module`."""
        (found,) = [process for process, command in self.commands().items() if f" {module} " in f"{command} "]
        return found

    def leftovers(self) -> list[str]:
        """Return the processes, and the contents of the runtime directory except the directory for clusters."""
        paths = [path for path in self.runtime.rglob("*") if path != self.runtime / "atoll"]
        return [f"process {each}" for each in self.commands().values()] + [str(path) for path in paths]


def kill_at_once(engine: psutil.Process, *controllers: psutil.Process) -> None:
    """Kill the engine and the controllers at once, as a power loss does.

    The engine is frozen while the controllers are killed. A controller that outlives its engine may shut the cluster
    down, and an engine that outlives its controller would restart it.
    """
    engine.suspend()
    for process in (*controllers, engine):
        process.kill()


def finish(process: subprocess.Popen[str]) -> Result:
    """Wait for the end of a process, within the deadline. Return its result."""
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{process.args!r} ran for over {DEADLINE:.0f} s\n{stdout}\n{stderr}") from None
    return Result(process.returncode, stdout, stderr)


def first_line(process: subprocess.Popen[str]) -> str:
    """Return the next line of a running process, after waiting for it within the deadline."""
    line = next_line(process)
    if not line:  # the last output comes first, because failure reports are truncated at their ends
        output = finish(process).stderr
        pytest.fail(f"ended with {process.returncode} and without a word: ...{output[-2000:]}\n{process.args!r}")
    return line.strip()


def eventually(holds: Callable[[], bool], seconds: float = 300.0, pause: float = 0.02) -> bool:
    """Return whether `holds` becomes true within these seconds. It is called again after each pause.

    If `holds` runs a command, use a longer pause, because each call starts a process.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def free_port() -> int:
    """Return a TCP port of the loopback device on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
