"""Check that a training keeps its share and its results while another tenant attacks the cluster.

Measures the training solo, beside the attacks, and solo again. The training must keep the fraction `--least` of its
solo rate, with no wrong value, no lost array and no restart of an island.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from scripts.hostile.attacks import ATTACKS

ROOT = Path(__file__).resolve().parents[2]
_TRY_SECONDS = 45.0  # after which a try that has not ended is killed, as a tenant kills a script
_SETTLE_SECONDS = 10.0  # that do not count after the attacks begin or end
_TENANTS = """
[tenant.honest]
token = "{honest}"

[tenant.hostile]
token = "{hostile}"
share = 0.5
memory = "128MiB"

[tenant.crashing]
token = "{crashing}"
share = 0.5
memory = "128MiB"
run_seconds = 2
"""
# A tenant whose programs crash compilers, or must be stopped, is suspended for a while. A second tenant makes all
# other attacks.
_CRASHES = ("recursion", "wrong-top-k", "device-loop", "device-loops")


class HostileError(Exception):
    """The cluster did not keep its promise."""


class Ground:
    """A cluster with an honest tenant and two hostile ones, in a temporary directory."""

    def __init__(self, islands: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="hostile-"))
        self.tokens = {name: os.urandom(24).hex() for name in ("honest", "hostile", "crashing")}
        tenants = self._directory / "tenants.toml"
        tenants.write_text(_TENANTS.format(**self.tokens))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "JAX_"))}
        environment |= {"XDG_RUNTIME_DIR": str(self._directory), "TMPDIR": str(self._directory)}
        environment |= {"JAX_PLATFORMS": "atoll", "ATOLL_CACHE_DIR": str(self._directory / "programs")}
        self._environment = environment
        up = ("up", "--islands", islands, "--device-memory", "512MiB", "--tenants", str(tenants))
        self._environment["ATOLL_ADDRESS"] = self.atoll(*up).strip()

    def atoll(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "atoll.operate.command", *arguments]
        ended = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=180)
        if ended.returncode:
            raise HostileError(f"atoll {' '.join(arguments)} failed: {ended.stderr}")
        return ended.stdout

    def restarts(self) -> list[int]:
        status: Any = json.loads(self.atoll("status", "--json"))
        return [island["restarts"] for island in status["islands"]]

    def events(self) -> str:
        """The cluster's last events, for whoever has to find out why a promise was broken."""
        status: Any = json.loads(self.atoll("status", "--json"))
        return "\n".join(f"  {event['kind']}: {event['text'][:200]}" for event in status["events"][-40:])

    def start(self, tenant: str, module: str, *arguments: str, out: IO[str] | int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**self._environment, "ATOLL_TOKEN": self.tokens[tenant]},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if out != subprocess.PIPE else None,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        down = [sys.executable, "-m", "atoll.operate.command", "down"]
        subprocess.run(down, env=self._environment, capture_output=True, timeout=60)
        log = self._directory / "log"
        if log.exists():
            sys.stderr.write(log.read_text(errors="replace")[-5000:])
        shutil.rmtree(self._directory, ignore_errors=True)


class Training:
    """The honest tenant's process, and how far it was when."""

    def __init__(self, ground: Ground) -> None:
        self._process = ground.start("honest", "scripts.hostile.training", out=subprocess.PIPE)
        self.lines: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()
        deadline = time.monotonic() + 120
        while not self.lines:
            self.check()
            if time.monotonic() > deadline:
                raise HostileError("the training did not start within 120 s")
            time.sleep(0.1)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def check(self) -> None:
        """Raises HostileError if it has ended."""
        if self._process.poll() is not None:
            last = self.lines[-1] if self.lines else "no output"
            raise HostileError(f"the training ended with status {self._process.returncode}, after {last}")

    def rate(self, begin: float, end: float) -> tuple[float, float]:
        """Steps per second between the two times, and the longest pause between two reports in seconds."""
        within = [each for each in self.lines if begin <= each["at"] <= end]
        if len(within) < 2:
            return 0.0, end - begin
        seconds = within[-1]["at"] - within[0]["at"]
        longest = max(b["at"] - a["at"] for a, b in itertools.pairwise(within))
        return (within[-1]["steps"] - within[0]["steps"]) / seconds, longest

    def end(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class Attackers:
    """One process per kind of attack; a try that ends, or takes too long, is followed by the next one."""

    def __init__(self, ground: Ground, kinds: list[str], seed: int, logs: Path, cores: set[int]) -> None:
        self._ground = ground
        self._cores = cores
        self._seed = seed
        self._logs = {kind: (logs / kind).open("a") for kind in kinds}
        self._running: dict[str, tuple[subprocess.Popen[str], float]] = {}
        self.tries: Counter[str] = Counter()

    def go_on(self) -> None:
        for kind, log in self._logs.items():
            process, since = self._running.get(kind, (None, 0.0))
            if process is not None and process.poll() is None:
                if time.monotonic() < since + _TRY_SECONDS:
                    continue
                _kill(process)
            self._seed += 1
            self.tries[kind] += 1
            tenant, module = "crashing" if kind in _CRASHES else "hostile", "scripts.hostile.attacks"
            process = self._ground.start(tenant, module, kind, str(self._seed), out=log)
            if self._cores:
                os.sched_setaffinity(process.pid, self._cores)
            self._running[kind] = process, time.monotonic()

    def end(self) -> None:
        for process, _ in self._running.values():
            _kill(process)
        for log in self._logs.values():
            log.close()


def _outcomes(logs: Path) -> str:
    """How often each attack came to an end, and the last outcome."""
    lines = {path.name: path.read_text(errors="replace").splitlines() for path in sorted(logs.iterdir())}
    return "\n".join(
        f"  {kind}: {len(each)} outcomes, last {each[-1][:120] if each else 'none'}" for kind, each in lines.items()
    )


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _for(seconds: float, training: Training, attackers: Attackers | None = None) -> tuple[float, float]:
    """When a phase begins to count, and when it ends."""
    begin = time.monotonic() + _SETTLE_SECONDS
    end = begin + seconds
    while time.monotonic() < end:
        training.check()
        if attackers is not None:
            attackers.go_on()
        time.sleep(0.5)
    return begin, end


def main(
    minutes: Annotated[float, typer.Option(help="How long the attacks last.")] = 10.0,
    solo: Annotated[float, typer.Option(help="Seconds of the solo training, before and after.")] = 60.0,
    islands: Annotated[str, typer.Option(help="The cluster.")] = "1x1x4",
    only: Annotated[str, typer.Option(help="Kinds of attack, separated by commas; all by default.")] = "",
    least: Annotated[float, typer.Option(help="Least fraction of its solo rate that the training must keep.")] = 0.45,
    seed: Annotated[int, typer.Option(help="The seed of all that is random.")] = 1,
) -> None:
    """Run it; exits with status 1 and a reason if a promise was broken."""
    kinds = only.split(",") if only else list(ATTACKS)
    logs = Path(tempfile.mkdtemp(prefix="hostile-logs-"))
    # Users' scripts run on other machines: the attackers' scripts get one half of the cores. The cluster and the
    # training get the other half, also for the solo rate.
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[: len(cores) // 2] or cores, set(cores[len(cores) // 2 :])
    os.sched_setaffinity(0, ours)
    ground = Ground(islands)
    training = attackers = None
    try:
        restarts = ground.restarts()
        training = Training(ground)
        before, _ = training.rate(*_for(solo, training))
        attackers = Attackers(ground, kinds, seed, logs, theirs)
        beside, pause = training.rate(*_for(minutes * 60, training, attackers))
        attackers.end()
        after, _ = training.rate(*_for(solo, training))
        restarted = [now - then for now, then in zip(ground.restarts(), restarts, strict=True)]
        ground.atoll("check")
    except HostileError as error:
        print(ground.events())
        print(f"failed: {error}; the attackers' output is in {logs}")
        raise typer.Exit(1) from None
    finally:
        if attackers is not None:
            attackers.end()
        if training is not None:
            training.end()
        ground.close()
    own = statistics.mean((before, after))
    print(f"solo {before:.1f} and {after:.1f} steps/s, beside the attacks {beside:.1f}: ratio {beside / own:.2f}")
    print(f"longest pause {pause:.1f} s; restarts of islands {restarted}; tries {dict(attackers.tries)}")
    print(_outcomes(logs))
    if any(restarted) or beside < least * own:
        print(f"failed: the ratio must be {least} or more, and no island may restart; output in {logs}")
        raise typer.Exit(1)
    shutil.rmtree(logs, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
