"""A cluster under load while its processes are killed.

Clients run random programs and transfers over 2x2x2 and check every result; meanwhile, every few seconds, a worker, a
proxy or a client is killed, or a worker stopped. In the end nothing may be wrong, hang, or be left behind.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from atoll.cluster.processes.client_folders import in_use
from scripts.soak.users import SoakError, Users

SETTLE_SECONDS = 60.0
# Nobody is struck in the last seconds: what was struck then would not be seen to come back.
LAST_SECONDS = 5.0
SHARED = Path("/dev/shm")
console = Console(soft_wrap=True)


def atoll(environment: Mapping[str, str], *arguments: str) -> str:
    """Runs the command; its output. Raises SoakError where it fails."""
    command = [sys.executable, "-m", "atoll.operate.command", *arguments]
    ended = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=180)
    if ended.returncode:
        raise SoakError(f"atoll {' '.join(arguments)} failed: {ended.stderr}")
    return ended.stdout


def report(environment: Mapping[str, str]) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(atoll(environment, "status", "--json"))
    return status


class Killer:
    """Picks a victim now and then."""

    def __init__(self, rng: random.Random, environment: Mapping[str, str], users: Users) -> None:
        self.rng = rng
        self.environment = environment
        self.users = users
        self.killed: Counter[str] = Counter()

    def strike(self) -> None:
        """Strikes somebody: where a victim was out of reach, another."""
        kinds = ["worker killed", "worker stopped", "proxy killed", "client killed"]
        while not self._hit(kind := self.rng.choices(kinds, [6, 1, 3, 3])[0]):
            pass
        self.killed[kind] += 1

    def _hit(self, kind: str) -> bool:
        """Whether there was somebody of that kind to hit."""
        if kind.startswith("worker"):
            hosts = [host for island in report(self.environment)["islands"] for host in island["hosts"]]
            victim = self.rng.choice([host for host in hosts if host["state"] == "ready"] or hosts)
            try:
                os.kill(victim["pid"], signal.SIGKILL if kind == "worker killed" else signal.SIGSTOP)
            except ProcessLookupError:
                return False
            return True
        user = self.rng.choice(self.users.alive)
        proxy = user.proxy()
        if proxy is None or user.doomed:
            return False
        user.doomed = kind
        if kind == "proxy killed":
            proxy.kill()
        else:
            user.process.kill()
        return True


def settle(environment: Mapping[str, str]) -> dict[str, Any]:
    """The report once all is quiet: no session, nothing in flight, no byte in use. Raises SoakError if it never is."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        status = report(environment)
        devices = [device for island in status["islands"] for host in island["hosts"] for device in host["devices"]]
        held = [device for device in devices if device["used_bytes"]]
        busy = [i for i in status["islands"] if i["state"] != "ready" or i["in_flight"] or i["waiting"]]
        if not status["sessions"] and not held and not busy:
            return status
        if time.monotonic() > deadline:
            raise SoakError(f"not all is back where it began: {json.dumps(status)}")
        time.sleep(0.5)


def main(
    minutes: Annotated[float, typer.Option(help="How long.")] = 10.0,
    clients: Annotated[int, typer.Option(help="How many at a time.")] = 3,
    every: Annotated[float, typer.Option(help="Seconds between two strikes, on average.")] = 5.0,
    islands: Annotated[str, typer.Option(help="The cluster.")] = "2x2x2",
    seed: Annotated[int, typer.Option(help="Of all that is random; 0: of the clock.")] = 0,
) -> None:
    """Run it; exits with 1 and says why where anything went wrong."""
    seed = seed or int(time.time())
    rng = random.Random(seed)
    runtime = Path(tempfile.mkdtemp(prefix="soak-"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "JAX_"))}
    environment |= {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime), "JAX_PLATFORMS": "atoll"}
    environment |= {"ATOLL_CACHE_DIR": str(runtime / "programs")}
    console.print(f"seed {seed}, {minutes:g} minutes, {clients} clients on {islands}")
    shared_before = set(SHARED.glob("atoll-*"))
    users = None
    try:
        address = atoll(environment, "up", "--islands", islands, "--device-memory", "512MiB").strip()
        environment["ATOLL_ADDRESS"] = address
        users = Users(clients, minutes * 60, seed, environment, runtime)
        killer = Killer(rng, environment, users)
        end = time.monotonic() + minutes * 60
        users.watch(min(20.0, minutes * 20))
        while time.monotonic() < end:
            if users.alive and time.monotonic() < end - LAST_SECONDS:
                killer.strike()
            users.watch(rng.expovariate(1 / every))
        while users.alive:
            users.watch(1.0)
        status = settle(environment)
        atoll(environment, "down")
        left = [str(path) for path in runtime.rglob("*") if path.is_socket()]
        left += [str(path) for path in SHARED.glob("atoll-*") if path not in shared_before and not in_use(path)]
        if left:
            raise SoakError(f"left behind: {left}")
        steps = users.steps()
        done = ", ".join(f"{count} {name}" for name, count in sorted(steps.items()))
        console.print(f"no wrong result, no hang, nothing left: {done}")
        console.print(f"killed: {dict(killer.killed)}; restarts: {[i['restarts'] for i in status['islands']]}")
        if not sum(killer.killed.values()):
            raise SoakError("nothing was killed: this proves nothing")
    except SoakError as error:
        console.print(f"[bold red]the soak failed[/] (seed {seed}): {error}", markup=True)
        log = runtime / "atoll" / "default" / "log"
        if log.exists():
            console.print(log.read_text(errors="replace")[-6000:], markup=False)
        raise typer.Exit(1) from None
    finally:
        if users is not None:
            users.kill()
        subprocess.run(
            [sys.executable, "-m", "atoll.operate.command", "down"], env=environment, capture_output=True, timeout=60
        )
        shutil.rmtree(runtime, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
