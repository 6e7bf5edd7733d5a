"""Runs the command `atoll` as a user does, in real processes, with a runtime directory of the test's own."""

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
from tests.conftest import ScriptResult, start_process
from tests.lines import next_line

COMMAND = [sys.executable, "-m", "atoll.operate.command"]
DEADLINE = 300.0  # seconds, for any one command


@dataclass(frozen=True)
class Result(ScriptResult):
    """How a command ended."""

    @property
    def error(self) -> str:
        """What it said in failing with status 1, in one line; fails the test where it did anything else."""
        assert self.returncode == 1, f"status {self.returncode}\n{self.stdout}\n{self.stderr}"
        assert not self.stdout, self.stdout
        assert self.stderr.count("\n") == 1, self.stderr
        return self.stderr.strip()


class User:
    """Somebody with a runtime directory, an environment, and no cluster yet.

    As a context manager it ends, however the test did, whatever runs in that directory.
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
            if started.returncode is None:  # a test that passes has seen each to its end
                started.kill()
                started.communicate()
        eventually(lambda: not self.processes())
        sweep(self.runtime)  # a proxy may have been killed before it had removed its client's directories

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        """Starts any command, in a process group of its own."""
        self._started.append(start_process(command, self.env | env, self.runtime))
        return self._started[-1]

    def start_atoll(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return self.start(*COMMAND, *arguments, **env)

    def atoll(self, *arguments: str, **env: str) -> Result:
        """Runs `atoll` to its end."""
        return finish(self.start_atoll(*arguments, **env))

    def script(self, code: str, **env: str) -> Result:
        """Runs a Python script to its end, and to that of its proxy; nothing but `env` says where."""
        process = self.start(sys.executable, "-c", textwrap.dedent(code), **env)
        ended = finish(process)
        its = f'"client":{process.pid},'  # of ProxyOptions
        assert eventually(lambda: not any(its in each for each in self.commands().values())), "its proxy does not end"
        return ended

    def processes(self) -> list[psutil.Process]:
        """The live processes that have this runtime directory in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                here = process.environ().get("XDG_RUNTIME_DIR") == str(self.runtime)
                if here and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def commands(self) -> dict[psutil.Process, str]:
        """Their command lines."""
        found = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                found[process] = " ".join(process.cmdline())
        return found

    def process(self, module: str) -> psutil.Process:
        """The one process of this user's that runs `module`."""
        (found,) = [process for process, command in self.commands().items() if f" {module} " in f"{command} "]
        return found

    def leftovers(self) -> list[str]:
        """Processes, and whatever is in the runtime directory but the empty one for clusters."""
        paths = [path for path in self.runtime.rglob("*") if path != self.runtime / "atoll"]
        return [f"process {each}" for each in self.commands().values()] + [str(path) for path in paths]


def finish(process: subprocess.Popen[str]) -> Result:
    """The end of a process, which it reaches within the deadline."""
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"{process.args!r} ran for over {DEADLINE:.0f} s\n{stdout}\n{stderr}") from None
    return Result(process.returncode, stdout, stderr)


def first_line(process: subprocess.Popen[str]) -> str:
    """What a process that goes on running prints first, or next; waits for it, within the deadline."""
    line = next_line(process)
    if not line:  # what it said last comes first: reports of failures are cut at their ends
        said = finish(process).stderr
        pytest.fail(f"ended with {process.returncode} and without a word: ...{said[-2000:]}\n{process.args!r}")
    return line.strip()


def eventually(holds: Callable[[], bool], seconds: float = 300.0) -> bool:
    """Whether `holds` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free_port() -> int:
    """A TCP port of the loopback device that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
