"""The place of the controller of a soak on machines, and the faults that it gets."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable

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

ENGINE_MACHINE = "m0"
_AUTHORITY = "/tmp/authority"
# In seconds of a `MachineClock`, as the following.
_ANSWER_SECONDS = 60.0
# For a standby to start, several Python processes on machines that share two busy cores, and to have all.
_START_SECONDS = 120.0
# Time for a superseded controller to notice, and end.
_END_SECONDS = 30.0


def is_of_controller(status: str) -> bool:
    """Return whether a controller made this report of `atoll status --json`, and not a standby, which serves nobody."""
    return "standby" not in json.loads(status)


class Controllers:
    """Knows the present controller. `machines` may have one; `reboot(machine)` also starts its host agents again."""

    def __init__(self, cluster: MachineCluster, machines: list[str], reboot: Callable[[str, Users], None]) -> None:
        self._cluster = cluster
        self._machines = machines
        self._reboot = reboot
        self._holder: Process = cluster.up  # of the engine that has the present controller
        self._standbys = 0
        shown = cluster.start(ENGINE_MACHINE, ["cat", _AUTHORITY])
        shown.wait()
        self._authority = shown.said
        self.seconds: dict[str, list[float]] = {}  # until a controller answered again, by kind

    @staticmethod
    def options() -> tuple[str, ...]:
        """Of `atoll up`, for the first one."""
        return ("--authority", _AUTHORITY, "--journal", "/tmp/journal")

    @property
    def machine(self) -> str:
        """Return the place of the current controller."""
        return self._holder.machine

    def inject(self, kind: str, users: Users, rng: random.Random) -> None:
        if kind == TAKEOVER_REBOOTED and self.machine == ENGINE_MACHINE:
            self.inject(TAKEOVER_KILLED, users, rng)  # to be elsewhere: the engine's end is the cluster's
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
        raise SoakError(f"there is no controller on {self.machine}:\n{self._holder.said[-2000:]}")

    def _answers(self, kind: str, injected: float) -> None:
        """Waits until there is an answer from the cluster's address, and from nowhere else."""
        deadline = Deadline(_ANSWER_SECONDS)
        while True:
            asked = self._cluster.atoll("status", "--json", machine=self.machine)  # others may not reach it
            self._cluster.forget(asked)
            if not asked.process.returncode and is_of_controller(asked.said):
                break
            if deadline.is_over:
                where = f"nobody answers at {self._cluster.address} within {_ANSWER_SECONDS:.0f} s"
                raise SoakError(f"{kind}: {where}: {asked.said}\n{self._holder.said[-4000:]}")
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
        self._await_end(earlier, process)

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
        cluster.address, cluster.known_as = f"{cluster.bed.address(machine)}:{port}", f"{machine}:{port}"
        return standby

    def _await_end(self, earlier: Process, process: psutil.Process) -> None:
        """The earlier controller ends, and its standby's engine with it: nobody is left who has them."""
        deadline = Deadline(_END_SECONDS)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if deadline.is_over:
                raise SoakError(f"the earlier controller on {earlier.machine} goes on:\n{earlier.said[-4000:]}")
            time.sleep(0.1)
        if earlier is self._cluster.up:
            return
        try:
            earlier.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise SoakError(f"an engine on {earlier.machine} whose controller is none any more goes on") from None
        self._cluster.forget(earlier)

    # ---- the end

    def ended(self, seconds: float) -> list[str]:
        """Return what is left of the current controller, unless it is the engine's."""
        if self._holder is self._cluster.up:
            return []
        status = self._holder.wait(seconds)
        return [f"the standby on {self.machine} ended with status {status}"] if status else []
