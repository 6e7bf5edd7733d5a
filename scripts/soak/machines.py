"""A soak on several "machines": an engine `hosts`, machines that reboot, and links that are cut, deaf or slow.

m0 has the controller and the engine at first. Both may move to another machine: see `controllers`. Each machine but one
has the hosts of two islands, so most faults affect not all islands: with three machines and islands of two
hosts, island 0 is on m1 and m2, and island 1 on m2 and m0.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import psutil

from atoll.cluster.topology import Topology
from scripts.soak import controllers, sessions
from scripts.soak.children import children_that_run
from scripts.soak.controllers import Controllers
from scripts.soak.ground import inject_user_fault, report
from scripts.soak.users import SoakError, UserProcess, Users
from tests.machines.bed import Machines
from tests.machines.clusters import MachineCluster, Process, environment
from tests.machines.machine_clock import Deadline

LEASE = 4.0
# For all islands to be ready again, once all is healed. In seconds of a `MachineClock`, as the following.
BACK_SECONDS = 60.0
# Processes that a machine has lost end by themselves, at the latest with their leases.
END_SECONDS = 30.0
# How often each is chosen.
KINDS = {
    "worker killed": 3,
    "worker stopped": 1,
    "start stopped": 2,
    "worker thawed": 2,
    "agent killed": 3,
    "machine rebooted": 3,
    "link cut": 3,
    "silent both ways": 4,
    "silent one way": 4,
    "1 Mbit/s": 2,
    "200 ms": 2,
    "proxy killed": 2,
    "client killed": 2,
    sessions.KIND: 3,
    sessions.KIND_AND_KILLED: 1,
    **controllers.KINDS,
}


def _next_worker(pid: int, before: int) -> psutil.Process:
    """The worker of a host agent that follows the one of that pid. Raises SoakError where none comes.

    A child that runs its program: until then its parent waits for it, and would be stopped with it.
    """
    deadline = Deadline(BACK_SECONDS)
    while not deadline.is_over:
        for child in children_that_run("atoll.worker.worker_main", pid):
            if child.pid != before:
                return child
        time.sleep(0.01)
    raise SoakError(f"the host agent {pid} started no worker within {BACK_SECONDS:.0f} s")


class ManyMachines:
    """See `ground.Ground`."""

    def __init__(self, machines: int, islands: str) -> None:
        self.kinds: Mapping[str, int] = KINDS
        self._bed = Machines(machines)
        self._topology = Topology.parse(islands)
        self._islands = islands
        self._cluster: MachineCluster
        self._agents: dict[int, tuple[str, Process]] = {}  # by host
        self._pids: dict[int, int] = {}  # of users, by process
        self.back: list[float] = []  # seconds

    def begin(self) -> None:
        options = ("--lease", str(LEASE), "--device-memory", "512MiB", "--suspend-directory", "/tmp/aside")
        self._cluster = MachineCluster(self._bed, self._islands, None, *options, *Controllers.options())
        for host in range(self._topology.host_count):
            # m1, m2, m2, m0, m0, m1, ...: an island is on two machines that follow one another.
            island = self._topology.island_of(host)
            turn = island + host - self._topology.first_host(island) + 1
            self._start_agent(host, self._bed.names[turn % len(self._bed.names)])
        self._cluster.is_up()
        count = self._topology.host_count
        few = [each for each in self._bed.names if 2 * len(self._hosts_on(each)) < count]
        self._controllers = Controllers(self._cluster, few, self._reboot)

    def _hosts_on(self, machine: str) -> list[int]:
        return [host for host, (where, _) in self._agents.items() if where == machine]

    def _start_agent(self, host: int, machine: str) -> None:
        agent = self._cluster.host(machine, "--rank", str(host))
        self._agents[host] = machine, agent

    def atoll(self, *arguments: str) -> str:
        ended = self._cluster.atoll(*arguments)
        self._cluster.forget(ended)
        if ended.process.returncode:
            raise SoakError(f"atoll {' '.join(arguments)} failed: {ended.output}")
        return ended.output

    def start_user(self, number: int, arguments: Sequence[str], errors: IO[str]) -> tuple[subprocess.Popen[str], str]:
        machine = self._bed.names[number % len(self._bed.names)]
        process = self._bed.popen(
            machine,
            [sys.executable, "-m", *arguments],
            environment(ATOLL_CACHE_DIR="off", **self._cluster.of_clients),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=1,
        )
        self._pids[process.pid] = self._bed.pid_of(process)
        return process, machine

    def pid_of(self, user: UserProcess) -> int:
        return self._pids[user.process.pid]

    @property
    def answered(self) -> Mapping[str, Sequence[float]]:
        """Seconds until a controller answered again, by kind of fault."""
        return self._controllers.seconds

    # ---- faults

    def inject(self, kind: str, users: Users, rng: random.Random) -> bool:
        if kind in ("proxy killed", "client killed"):
            return inject_user_fault(self, kind, users, rng)
        injected = time.monotonic()
        if kind.startswith(("worker", "agent", "start")):
            if not self._inject_process_fault(kind, users, rng):
                return False
        elif kind == "machine rebooted":
            kept = {self._controllers.engine_machine, self._controllers.machine}
            self._reboot(rng.choice([each for each in self._bed.names if each not in kept]), users)
        elif kind in controllers.KINDS:
            self._controllers.inject(kind, users, rng)
        elif kind in (sessions.KIND, sessions.KIND_AND_KILLED):
            if not sessions.suspend(self, users, rng, lambda: self._meanwhile(kind, users, rng)):
                return False
        else:
            self._inject_network_fault(kind, users, rng)
        healed = time.monotonic()
        users.over()
        print(f"{time.strftime('%H:%M:%S')} {kind}: healed after {healed - injected:.1f} s", end="", flush=True)
        self._await_islands(users)
        self._controllers.await_superseded(lambda: report(self))
        if kind in controllers.KINDS:
            self._check()
        self.back.append(time.monotonic() - healed)
        print(f", all islands ready {self.back[-1]:.1f} s later", flush=True)
        return True

    def _check(self) -> None:
        """The controller's books, and the hosts', which have long computations in between."""
        deadline = Deadline(BACK_SECONDS)
        while True:
            try:
                self.atoll("check")
                return
            except SoakError as error:
                if "has not answered" not in str(error) or deadline.is_over:
                    raise

    def _meanwhile(self, kind: str, users: Users, rng: random.Random) -> None:
        """While a session is suspended."""
        if kind == sessions.KIND_AND_KILLED:
            self._controllers.inject(controllers.KILLED, users, rng)

    def _inject_process_fault(self, kind: str, users: Users, rng: random.Random) -> bool:
        host, (machine, agent) = rng.choice(sorted(self._agents.items(), key=lambda item: item[0]))
        try:
            workers = psutil.Process(agent.pid).children()
            if kind == "agent killed":
                agent.signal(signal.SIGKILL)
                self._start_agent(host, machine)
            elif not workers:
                return False
            elif kind == "worker killed":
                workers[0].kill()
            elif kind == "start stopped":
                workers[0].kill()
                _next_worker(agent.pid, workers[0].pid).suspend()
                users.watch(LEASE + 2)  # for it to be missed
            else:
                workers[0].suspend()
                if kind == "worker thawed":
                    users.watch(rng.choice([1.0, LEASE + 1, 2 * LEASE]))
                    workers[0].resume()
                else:
                    users.watch(LEASE + 2)  # for it to be missed
        except (psutil.Error, ProcessLookupError):
            return kind == "worker thawed"  # it was ended before it could thaw
        return True

    def _reboot(self, machine: str, users: Users) -> None:
        self._doom(users, "machine rebooted", machine)
        self._bed.reboot(machine)
        for host in self._hosts_on(machine):
            self._start_agent(host, machine)

    def _inject_network_fault(self, kind: str, users: Users, rng: random.Random) -> None:
        seconds = rng.choice([1.0, LEASE - 2, LEASE + 1, LEASE + 6, 2 * LEASE + 8])
        one, other = rng.sample(self._bed.names, 2)
        try:
            match kind:
                case "link cut":
                    self._doom(users, kind, one)
                    self._bed.cut(one)
                case "silent both ways":
                    self._doom(users, kind, one, other)
                    self._bed.drop_both(one, other)
                case "silent one way":
                    self._doom(users, kind, one, other)
                    self._bed.drop(one, other)
                case "1 Mbit/s":
                    self._doom(users, kind, one)
                    self._bed.limit(one, "1mbit")
                case "200 ms":
                    self._bed.delay(one, 200)
            print(f"({one}, {other}, {seconds:g} s) ", end="", flush=True)
            users.watch(seconds)
        finally:
            match kind:
                case "link cut":
                    self._bed.join(one)
                case "1 Mbit/s":
                    self._bed.limit(one, "")
                case "200 ms":
                    self._bed.delay(one, 0)
                case _:
                    self._bed.heal()

    def _doom(self, users: Users, kind: str, *machines: str) -> None:
        """Users on these machines may lose their sessions, rightly, and all where one has the engine or controller."""
        of_cluster = self._controllers.engine_machine, self._controllers.machine
        users.doom(kind, lambda user: not {user.machine, *of_cluster}.isdisjoint(machines))

    def _await_islands(self, users: Users) -> None:
        deadline = Deadline(BACK_SECONDS)
        while True:
            users.watch(1.0)
            status: dict[str, Any] = report(self)
            if all(island["state"] == "ready" for island in status["islands"]):
                return
            if deadline.is_over:
                raise SoakError(f"not all islands are ready again: {json.dumps(status)}")

    # ---- the end

    def end(self) -> list[str]:
        self._controllers.await_superseded(lambda: report(self))
        self.atoll("down")
        left = self._controllers.ended(END_SECONDS)
        for host, (machine, agent) in self._agents.items():
            if agent.wait(END_SECONDS):
                left.append(f"the agent of host {host} on {machine} ended with status {agent.process.returncode}")
        for machine in self._bed.names:
            left += [f"{machine}: {each}" for each in self._left_on(machine)]
        return left

    def _left_on(self, machine: str) -> list[str]:
        """Processes but for the machine's own, and files."""
        first = psutil.Process(self._bed.pid(machine))
        deadline = Deadline(END_SECONDS)
        while (running := [each for each in _in_namespace(first)]) and not deadline.is_over:
            time.sleep(0.2)
        left = [f"process {' '.join(each)}" for each in running]
        find = "find /tmp /dev/shm ( -type s -o -name atoll-* -path /dev/shm/* -o -path */atoll-*/*join* )"
        listing = self._cluster.start(machine, find.split())
        listing.wait()
        return left + listing.output.split()

    def log(self) -> str:
        return self._cluster.log()

    def close(self) -> None:
        if hasattr(self, "_cluster"):
            self._cluster.__exit__()
        self._bed.close()


def _in_namespace(first: psutil.Process) -> list[list[str]]:
    """The command lines of what runs on the machine of this first process, without it."""
    space = os.stat(f"/proc/{first.pid}/ns/pid").st_ino
    found = []
    for process in psutil.process_iter():
        try:
            inside = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == space
            if inside and process.pid != first.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
        except (psutil.Error, OSError):
            continue
    return found
