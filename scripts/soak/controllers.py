"""The places of the controller and the engine of a soak on machines, and the faults that the controller gets."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from scripts.soak.children import children_that_run
from scripts.soak.users import SoakError, Users
from tests.machines.clusters import ATOLL, PORT, MachineCluster, Process
from tests.machines.machine_clock import Deadline

KILLED = "controller killed"
TAKEOVER_KILLED = "takeover, controller killed"
TAKEOVER_FROZEN = "takeover, controller frozen"
TAKEOVER_CUT_OFF = "takeover, controller cut off"
TAKEOVER_REBOOTED = "takeover, machine rebooted"
KINDS = {KILLED: 4, TAKEOVER_KILLED: 2, TAKEOVER_FROZEN: 1, TAKEOVER_CUT_OFF: 2, TAKEOVER_REBOOTED: 3}

_FIRST_MACHINE = "m0"
_AUTHORITY = "/tmp/authority"
# In seconds of a `MachineClock`, as the following.
_ANSWER_SECONDS = 60.0
# For a standby to start, several Python processes on machines that share two busy cores, and to have all.
_START_SECONDS = 120.0
# Time for a superseded controller or engine to notice, and end.
_END_SECONDS = 30.0


def is_of_controller(status: str) -> bool:
    """Return whether a controller made this report of `atoll status --json`, and not a standby, which serves nobody."""
    return "standby" not in json.loads(status)


class Controllers:
    """Knows the present controller and engine. `machines` may have one; `reboot(machine)` also starts its host agents.

    The engine of the first `atoll up` has the role of the engine until a standby's takes it, as reports of the cluster
    say: see `note`.
    """

    def __init__(self, cluster: MachineCluster, machines: list[str], reboot: Callable[[str, Users], None]) -> None:
        self._cluster = cluster
        self._machines = machines
        self._reboot = reboot
        self._holder: Process = cluster.up  # `atoll up` that has the present controller
        self._engine: Process = cluster.up  # `atoll up` whose engine has the role of the engine
        self._running: list[Process] = []  # each `atoll up` that has not ended
        self._engines: dict[tuple[str, int], Process] = {}  # each `atoll up`, by machine and pid there of its engine
        self._add(cluster.up)
        self._standbys = 0
        shown = cluster.start(_FIRST_MACHINE, ["cat", _AUTHORITY])
        shown.wait()
        self._authority = shown.output
        self.seconds: dict[str, list[float]] = {}  # until a controller answered again, by kind

    @staticmethod
    def options() -> tuple[str, ...]:
        """Of `atoll up`, for the first one."""
        return ("--authority", _AUTHORITY, "--journal", "/tmp/journal")

    @property
    def machine(self) -> str:
        """Return the place of the current controller."""
        return self._holder.machine

    @property
    def engine_machine(self) -> str:
        """Return the place of the process that has the role of the engine."""
        return self._engine.machine

    def note(self, status: dict[str, Any]) -> bool:
        """Note which process has the role of the engine by a report of the cluster. Return whether any has it."""
        engine = status["engine"]
        if engine is None:
            return False
        machines = [each for each in self._cluster.bed.names if each == engine["machine"]] or [
            each for each in self._cluster.bed.names if self._cluster.bed.address(each) == engine["machine"]
        ]
        found = [self._engines.get((machine, engine["pid"])) for machine in machines]
        if not found or found[0] is None:
            raise SoakError(f"the soak did not start the engine of the cluster: {engine}")
        self._engine = found[0]
        return True

    def _add(self, up: Process) -> None:
        engines = list(children_that_run("atoll.engines.engine_main", up.pid, recursive=True))
        if not engines:
            raise SoakError(f"`atoll up` on {up.machine} has no engine process:\n{up.output[-2000:]}")
        self._engines[up.machine, _pid_there(engines[0].pid)] = up
        self._running.append(up)

    def inject(self, kind: str, users: Users, rng: random.Random) -> None:
        if kind == TAKEOVER_REBOOTED and self.machine == self.engine_machine:
            self.inject(TAKEOVER_KILLED, users, rng)  # to be elsewhere than the engine
        users.doom(kind, lambda user: not user.steps)  # a script that starts while nobody listens fails
        if kind == KILLED:
            injected = time.monotonic()
            self._process().kill()
            self._answers(kind, injected)
        else:
            self._take_over(kind, users, rng)

    def _process(self) -> psutil.Process:
        """The present controller's."""
        module = "atoll.controller_process.controller_main"
        for each in children_that_run(module, self._holder.pid, recursive=True):
            return each
        raise SoakError(f"there is no controller on {self.machine}:\n{self._holder.output[-2000:]}")

    def _answers(self, kind: str, injected: float) -> None:
        """Waits until there is an answer from the cluster's address, and from nowhere else."""
        deadline = Deadline(_ANSWER_SECONDS)
        while True:
            asked = self._cluster.atoll("status", "--json", machine=self.machine)  # others may not reach it
            self._cluster.forget(asked)
            if not asked.process.returncode and is_of_controller(asked.output):
                self.note(json.loads(asked.output))
                break
            if deadline.is_over:
                where = f"nobody answers at {self._cluster.address} within {_ANSWER_SECONDS:.0f} s"
                raise SoakError(f"{kind}: {where}: {asked.output}\n{self._holder.output[-4000:]}")
        self.seconds.setdefault(kind, []).append(time.monotonic() - injected)
        print(f"{kind}: an answer after {time.monotonic() - injected:.1f} s; ", end="", flush=True)

    # ---- standbys

    def _take_over(self, kind: str, users: Users, rng: random.Random) -> None:
        earlier, earlier_machine, process = self._holder, self.machine, self._process()
        standby = self._start_standby(rng.choice([each for each in self._machines if each != earlier_machine]))
        others = [each for each in self._cluster.bed.names if each != earlier_machine]
        injected = time.monotonic()
        match kind:
            case "takeover, controller killed":
                process.kill()
            case "takeover, controller frozen":
                process.suspend()
            case "takeover, controller cut off":
                users.doom(kind, lambda user: True)  # what was on its way to the standby is lost
                for other in others:
                    self._cluster.bed.drop_both(earlier_machine, other)
            case _:
                users.doom(kind, lambda user: True)
                self._reboot(earlier_machine, users)
        self._holder = standby
        self._answers(kind, injected)
        if kind == TAKEOVER_FROZEN:
            process.resume()
        self._cluster.bed.heal()
        _await_end(earlier, process)

    def _start_standby(self, machine: str) -> Process:
        """Start a standby of the current controller. From now on, the cluster's address is that of the standby."""
        cluster = self._cluster
        self._standbys += 1
        port = PORT + self._standbys
        kept = cluster.start(
            machine, ["sh", "-c", f'umask 077; printf %s "$KEPT" > {_AUTHORITY}'], KEPT=self._authority
        )
        kept.wait()
        cluster.forget(kept)
        options = ("--authority", _AUTHORITY, "--journal", f"/tmp/journal-{self._standbys}")
        where = ("--listen", f"{cluster.bed.address(machine)}:{port}", "--name", f"standby-{self._standbys}")
        follows = ("--standby", cluster.address)
        standby = cluster.start(machine, [*ATOLL, "up", "--foreground", *follows, *where, *options])
        try:
            standby.line(lambda line: "follows the controller at" in line, seconds=_START_SECONDS)
        except AssertionError as error:
            raise SoakError(f"a standby on {machine} does not come to follow: {error}") from None
        self._add(standby)
        cluster.address, cluster.known_as = f"{cluster.bed.address(machine)}:{port}", f"{machine}:{port}"
        return standby

    def await_superseded(self, report: Callable[[], dict[str, Any]]) -> None:
        """Wait until the cluster has an engine, and all others have ended but that of the present controller."""
        deadline = Deadline(_END_SECONDS)
        while not self.note(report()):
            if deadline.is_over:
                raise SoakError(f"the cluster has no engine:\n{self._engine.output[-4000:]}")
            time.sleep(0.2)
        for each in [each for each in self._running if each not in (self._holder, self._engine)]:
            try:
                each.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                text = f"the engine on {each.machine} has neither the role nor the controller, and does not end"
                raise SoakError(f"{text}:\n{each.output[-4000:]}") from None
            self._running.remove(each)

    # ---- the end

    def ended(self, seconds: float) -> list[str]:
        """Return what is left of the current controller and of the engine, after the end of the cluster."""
        left = []
        for each in self._running:
            if status := each.wait(seconds):
                left.append(f"atoll up on {each.machine} ended with status {status}")
        return left


def _await_end(earlier: Process, process: psutil.Process) -> None:
    """Wait until an earlier controller has ended. Its engine may continue: see `Controllers.await_superseded`."""
    deadline = Deadline(_END_SECONDS)
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if deadline.is_over:
            raise SoakError(f"the earlier controller on {earlier.machine} goes on:\n{earlier.output[-4000:]}")
        time.sleep(0.1)


def _pid_there(pid: int) -> int:
    """Return the pid of a process in its own pid namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))
