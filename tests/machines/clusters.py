"""A cluster on simulated machines: the controller on m0, host agents on other machines, and scripts on any machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.machines.bed import Machines
from tests.machines.machine_clock import Deadline

ROOT = Path(__file__).resolve().parents[2]
PORT = 7000
POLL_SECONDS = 0.5
ATOLL = [sys.executable, "-c", "from atoll.operate.command import main; main()"]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of commands on machines, without this process's JAX settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "ATOLL_", "IFRT_PROXY_", "XDG_")) and name not in ("NPROC", "XLA_FLAGS")
    }
    paths = [str(ROOT / "src"), str(ROOT)]
    run = os.environ.get("ATOLL_TEST_RUN", "")
    own = {"PYTHONPATH": os.pathsep.join(paths), "ATOLL_TEST_RUN": run, "ATOLL_STATE_DIR": "off"}
    return {**kept, **own, **more}


class Process:
    """Command on a machine, with its output so far, line by line with times."""

    def __init__(self, bed: Machines, machine: str, command: list[str], env: dict[str, str]) -> None:
        self.machine = machine
        self.lines: list[tuple[float, str]] = []
        self._bed = bed
        self._changed = threading.Condition()
        self.process = bed.popen(
            machine, command, env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append((time.monotonic(), line.rstrip()))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        return self._bed.pid_of(self.process)

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def line(self, holds: Callable[[str], bool], since: float = 0.0, seconds: float = 60.0) -> tuple[float, str]:
        """Return the first line after `since` for which `holds` is true, and its time.

        Fail if no line does so within so many seconds of a `MachineClock`.
        """

        def found() -> tuple[float, str] | None:
            return next((each for each in self.lines if each[0] > since and holds(each[1])), None)

        def is_settled() -> bool:
            return found() is not None or not self._reader.is_alive()

        deadline, over = Deadline(seconds), False
        while not over and not deadline.is_over:
            with self._changed:
                over = self._changed.wait_for(is_settled, POLL_SECONDS)
        line = found()
        assert line is not None, f"{'no such line' if over else 'nothing'} within {seconds} s of:\n{self.output}"
        return line

    def wait(self, seconds: float = 60.0) -> int:
        """Return the exit status. Raise TimeoutExpired after so many seconds of a `MachineClock`."""
        deadline = Deadline(seconds)
        while (status := self.process.poll()) is None:
            try:
                status = self.process.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if deadline.is_over:
                    raise
        self._reader.join(10)
        return status

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Commands:
    """Commands on machines, with a common environment. At the end of the context, all of them are killed."""

    def __init__(self, bed: Machines, environment: dict[str, str]) -> None:
        self.bed = bed
        self._environment = environment
        self.processes: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            process.end()

    def start(self, machine: str, command: list[str], **more: str) -> Process:
        process = Process(self.bed, machine, command, {**self._environment, **more})
        self.processes.append(process)
        return process

    def forget(self, process: Process) -> None:
        """Drop a command that has ended and whose output is not needed any more."""
        process.end()
        self.processes.remove(process)


class MachineCluster(Commands):
    """Cluster started by `atoll up --engine hosts` on m0."""

    def __init__(
        self, bed: Machines, islands: str, cache: Path | None = None, *options: str, secured: bool = True, **env: str
    ) -> None:
        self.address = f"{bed.address('m0')}:{PORT}"
        self.known_as = f"m0:{PORT}"  # where hosts and clients can find the controller
        plain = {} if secured else {"ATOLL_INSECURE": "1", "ATOLL_TOKEN": "of the machines"}
        super().__init__(bed, environment(ATOLL_CACHE_DIR=str(cache) if cache else "off", **plain, **env))
        self.join = self._host_join = ""
        self._host_started = self._start_seconds = 0.0
        listen = ("--listen", self.address, "--engine", "hosts", "--islands", islands)
        self.up = self.start("m0", [*ATOLL, "up", "--foreground", *listen, *options])
        self.up.line(lambda line: "waiting for hosts" in line, seconds=30)
        if secured:
            directory = f"/tmp/atoll-{os.getuid()}/default"
            shown = self.start("m0", ["cat", f"{directory}/join", f"{directory}/join-hosts"])
            shown.wait()
            self.join, self._host_join = shown.output.split()

    def host(self, machine: str, *options: str, under: tuple[str, ...] = (), **more: str) -> Process:
        """Start a host agent on a machine. `under` is a command that runs it, with its options."""
        secret = {"ATOLL_JOIN": self._host_join}
        self._host_started = time.monotonic()
        return self.start(machine, [*under, *ATOLL, "host", "--address", self.known_as, *options], **secret, **more)

    def standby(self, machine: str, *options: str, of: str = "m0") -> Process:
        """Start a standby on a machine, with a copy of the certificate authority, as an operator would make it.

        The authority is /tmp/authority.
        """
        shown = self.start("m0", ["cat", "/tmp/authority"])
        shown.wait()
        copy = ["sh", "-c", 'umask 077; printf %s "$KEPT" > /tmp/authority']
        assert self.start(machine, copy, KEPT=shown.output).wait() == 0
        listen = ("--listen", f"{self.bed.address(machine)}:{PORT}")
        follows = ("--standby", f"{self.bed.address(of)}:{PORT}")
        process = self.start(machine, [*ATOLL, "up", "--foreground", *follows, *listen, *options])
        process.line(lambda line: "follows the controller at" in line)
        return process

    def atoll(self, *arguments: str, machine: str = "m0") -> Process:
        """Run an `atoll` command, and return its result. It only asks the controller at `address`."""
        process = self.start(machine, [*ATOLL, *arguments, "--address", self.address], ATOLL_JOIN=self.join)
        process.wait()
        return process

    def status(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.atoll("status", "--json").output)
        return report

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], seconds: float = 60.0) -> dict[str, Any]:
        """Return the first report for which `holds` is true, within so many seconds of a `MachineClock`."""
        deadline = Deadline(seconds)
        while not holds(report := self.status()):
            assert not deadline.is_over, json.dumps(report, indent=1)
            time.sleep(0.2)
        return report

    def is_up(self, seconds: float = 60.0) -> None:
        up, _ = self.up.line(lambda line: line.removeprefix("tls://") == self.address, seconds=seconds)
        self._start_seconds = up - self._host_started

    def restart_seconds(self, waits: float) -> float:
        """Return the maximum seconds until a restarted island is ready.

        The limit depends on the speed of this machine, because a worker's start takes CPU time: it is three times the
        start of the cluster, measured by `is_up`, plus `waits` seconds for waits that take a fixed time.
        """
        return waits + 3 * self._start_seconds

    def script(self, machine: str, code: str, **more: str) -> Process:
        """Start a user's script on a machine."""
        return self.start(machine, [sys.executable, "-u", "-c", textwrap.dedent(code)], **self.of_clients, **more)

    @property
    def of_clients(self) -> dict[str, str]:
        """Return the environment with which a client on any machine uses this cluster."""
        return {"JAX_PLATFORMS": "atoll", "ATOLL_ADDRESS": self.known_as, "ATOLL_JOIN": self.join}

    def log(self) -> str:
        """Return the output of all processes, for a failed test."""
        return "\n".join(f"--- {each.machine}: {each.process.args!r}\n{each.output}" for each in self.processes)
