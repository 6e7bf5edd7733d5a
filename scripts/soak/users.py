"""The processes of the soak's users: started, watched for progress, replaced when they were killed."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from scripts.soak.client import WRONG

ROOT = Path(__file__).resolve().parents[2]
SILENCE_SECONDS = 90.0  # an island's restart, and what had to be compiled again


class SoakError(Exception):
    """Something happened that must not: a wrong result, a hang, an error that nobody caused, something left behind."""


@dataclass
class UserProcess:
    """One client. `doomed` is set by whoever kills it, or its proxy."""

    process: subprocess.Popen[str]
    errors: IO[str]
    doomed: str = ""
    heard: float = field(default_factory=time.monotonic)
    steps: Counter[str] = field(default_factory=Counter)

    def proxy(self) -> psutil.Process | None:
        try:
            for child in psutil.Process(self.process.pid).children():
                if "atoll.ifrt.main" in child.cmdline():
                    return child
        except psutil.Error:
            pass
        return None


class Users:
    """Keeps `count` clients at work on the cluster that `environment` names, for `seconds`."""

    def __init__(self, count: int, seconds: float, seed: int, environment: Mapping[str, str], logs: Path) -> None:
        self._end = time.monotonic() + seconds
        self._environment = dict(environment)
        self._logs = logs
        self._seed = seed
        self._selector = selectors.DefaultSelector()
        self.alive: list[UserProcess] = []
        self.ended: list[UserProcess] = []
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        self._seed += 1
        left = max(1.0, self._end - time.monotonic())
        errors = open(self._logs / f"user-{self._seed}", "w+")  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.soak.client", str(self._seed), f"{left:.1f}"],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        user = UserProcess(process, errors)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, user)
        self.alive.append(user)

    def watch(self, seconds: float) -> None:
        """Reads what they say for so long. Raises SoakError for what must not happen."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.alive:
            for key, _ in self._selector.select(left):
                self._hear(key.data)
            now = time.monotonic()
            for user in self.alive:
                if now - user.heard > SILENCE_SECONDS:
                    raise SoakError(f"user {user.process.pid} hangs: nothing for {SILENCE_SECONDS:.0f} s\n{tail(user)}")

    def _hear(self, user: UserProcess) -> None:
        assert user.process.stdout is not None
        text = user.process.stdout.read()
        if text:
            user.heard = time.monotonic()
            user.steps.update(line.split()[0] for line in text.splitlines() if line)
            return
        self._selector.unregister(user.process.stdout)
        user.process.stdout.close()
        status = user.process.wait()
        self.alive.remove(user)
        self.ended.append(user)
        if status == WRONG:
            raise SoakError(f"a wrong result\n{tail(user)}")
        if status and not user.doomed:
            raise SoakError(f"user {user.process.pid} ended with status {status}, untouched\n{tail(user)}")
        user.errors.close()
        if time.monotonic() < self._end - 1:
            self._start()

    def kill(self) -> None:
        """Ends all that are left."""
        for user in self.alive:
            os.killpg(user.process.pid, signal.SIGKILL)
            user.process.wait()

    def steps(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for user in (*self.alive, *self.ended):
            total.update(user.steps)
        return total


def tail(user: UserProcess, size: int = 4000) -> str:
    user.errors.seek(0)
    return user.errors.read()[-size:]
