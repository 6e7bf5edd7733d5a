"""A soak on this machine, with a separate engine, whose processes are killed and stopped."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from atoll.cluster.processes.client_directories import in_use
from scripts.soak.ground import inject_user_fault, report
from scripts.soak.users import ROOT, SoakError, UserProcess, Users

SHARED = Path("/dev/shm")


class OneMachine:
    """See `ground.Ground`."""

    def __init__(self, islands: str) -> None:
        self.kinds: Mapping[str, int] = {"worker killed": 6, "worker stopped": 1, "proxy killed": 3, "client killed": 3}
        self._islands = islands
        self._directory = Path(tempfile.mkdtemp(prefix="soak-"))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "JAX_"))}
        environment |= {
            "XDG_RUNTIME_DIR": str(self._directory),
            "TMPDIR": str(self._directory),
            "JAX_PLATFORMS": "atoll",
        }
        environment |= {"ATOLL_CACHE_DIR": str(self._directory / "programs")}
        self._environment = environment
        self._shared_before = set(SHARED.glob("atoll-*"))
        self._pids: set[int] = set()  # of all processes that it has started itself, among them all clients

    def begin(self) -> None:
        up = ("up", "--islands", self._islands, "--device-memory", "512MiB")
        self._environment["ATOLL_ADDRESS"] = self.atoll(*up).strip()

    def atoll(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "atoll.operate.command", *arguments]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=self._environment, stdout=pipe, stderr=pipe, text=True) as process:
            self._pids.add(process.pid)
            try:
                stdout, stderr = process.communicate(timeout=180)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise SoakError(f"atoll {' '.join(arguments)} failed: {stderr}")
        return stdout

    def start_user(self, number: int, arguments: Sequence[str], errors: IO[str]) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._pids.add(process.pid)
        return process, ""

    def pid_of(self, user: UserProcess) -> int:
        return user.process.pid

    def inject(self, kind: str, users: Users, rng: random.Random) -> bool:
        if not kind.startswith("worker"):
            return inject_user_fault(self, kind, users, rng)
        hosts = [host for island in report(self)["islands"] for host in island["hosts"]]
        victim = rng.choice([host for host in hosts if host["state"] == "ready"] or hosts)
        try:
            os.kill(victim["pid"], signal.SIGKILL if kind == "worker killed" else signal.SIGSTOP)
        except ProcessLookupError:
            return False
        return True

    def end(self) -> list[str]:
        self.atoll("down")
        left = [str(path) for path in self._directory.rglob("*") if path.is_socket()]
        # The name of a client's directory contains its pid. Other programs on this machine also make and remove some.
        shared = {path for pid in self._pids for path in SHARED.glob(f"atoll-{pid}-*")} - self._shared_before
        return left + [str(path) for path in sorted(shared) if not in_use(path)]

    def log(self) -> str:
        log = self._directory / "atoll" / "default" / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    def close(self) -> None:
        down = [sys.executable, "-m", "atoll.operate.command", "down"]
        subprocess.run(down, env=self._environment, capture_output=True, timeout=60)
        shutil.rmtree(self._directory, ignore_errors=True)
