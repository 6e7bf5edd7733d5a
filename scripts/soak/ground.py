"""The interface to the cluster of a soak, to its users, and to the faults that can be injected."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

import psutil

from scripts.soak.children import children_that_run
from scripts.soak.users import SoakError, UserProcess, Users, tail

_DUMP_SECONDS = 1.0  # for a process to write what its threads are doing


class Ground(Protocol):
    """A cluster that is up from `begin` on."""

    # Kinds of faults, and how often each is to be chosen.
    kinds: Mapping[str, int]

    def begin(self) -> None: ...

    def atoll(self, *arguments: str) -> str:
        """Runs the command; its output. Raises SoakError where it fails."""

    def start_user(self, number: int, arguments: Sequence[str], errors: IO[str]) -> tuple[subprocess.Popen[str], str]:
        """Starts a module with arguments, which come first. Returns the process and a name of its machine."""

    def pid_of(self, user: UserProcess) -> int:
        """The pid of the user's Python, as this process knows it."""

    def inject(self, kind: str, users: Users, rng: random.Random) -> bool:
        """Inject a fault, and repair what can be repaired. Return False if no victim of that kind was in reach."""

    def end(self) -> list[str]:
        """Ends the cluster in good order. Returns what is left of it."""

    def log(self) -> str: ...

    def close(self) -> None:
        """Ends all by force."""


def report(ground: Ground) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(ground.atoll("status", "--json"))
    return status


def proxy_of(ground: Ground, user: UserProcess) -> psutil.Process | None:
    try:
        return next(children_that_run("atoll.ifrt.proxy_main", ground.pid_of(user)), None)
    except (psutil.Error, OSError):
        return None


def describe_hang(ground: Ground, user: UserProcess) -> str:
    """Return the stacks of the user and its proxy, the status of the cluster, and what its sessions wait for."""
    proxy = proxy_of(ground, user)
    for process in (psutil.Process(ground.pid_of(user)), *([proxy] if proxy is not None else [])):
        process.send_signal(signal.SIGUSR1)
        time.sleep(_DUMP_SECONDS)
    status = report(ground)
    why = "\n".join(f"session {each['id']}: {ground.atoll('why', str(each['id']))}" for each in status["sessions"])
    return f"{tail(user, 12_000)}\n{json.dumps(status)}\n{why}"


def inject_user_fault(ground: Ground, kind: str, users: Users, rng: random.Random) -> bool:
    """`kind` is "proxy killed" or "client killed"."""
    user = rng.choice(users.alive)
    proxy = proxy_of(ground, user)
    if proxy is None or user.doomed:
        return False
    user.doomed = kind
    if kind == "proxy killed":
        proxy.kill()
    else:
        user.process.kill()
    return True


__all__ = ["Ground", "SoakError", "describe_hang", "inject_user_fault", "proxy_of", "report"]
