"""A Ray cluster over the machines of a bed, started as a user starts one: `ray start` on each."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.machines.bed import Machines
from tests.machines.clusters import ATOLL, Commands, Process, environment

PORT = 6379
_RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
# Ray starts several processes on each machine. This only ends a start that hangs.
_START_SECONDS = 300.0
_OPTIONS = ("--disable-usage-stats", "--object-store-memory", "80000000", "--block")

# What Ray has that is not its own; run as a driver of its own.
_HAS = """
    import json, ray
    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    actors = [each["ActorClassName"] for each in ray._private.state.actors().values() if each["State"] != "DEAD"]
    groups = [each["name"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
    print(json.dumps(sorted(actors + groups)))
"""

_NODES = """
    import json, ray
    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    print(json.dumps({each["NodeManagerAddress"]: each["NodeID"] for each in ray.nodes() if each["Alive"]}))
"""


def is_address(line: str) -> bool:
    """Whether `atoll up` says where its cluster is."""
    return line.removeprefix("tls://").startswith("10.77.")


class RayMachines(Commands):
    """Ray's head on m0, with no CPU to offer, and a node on each other machine."""

    def __init__(self, bed: Machines) -> None:
        # Ray's own wait for dead nodes is a minute, and that of nodes for a dead head another.
        quick = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000"}
        quick |= {"RAY_health_check_failure_threshold": "3", "RAY_health_check_initial_delay_ms": "1000"}
        quick["RAY_gcs_rpc_server_reconnect_timeout_s"] = "10"
        super().__init__(bed, environment(ATOLL_CACHE_DIR="off", **quick))
        self.rays: dict[str, Process] = {}
        try:
            self._start_ray()
        except BaseException:
            self.__exit__()
            raise

    def _start_ray(self) -> None:
        first, *others = self.bed.names
        head = ("--head", "--port", str(PORT), "--num-cpus", "0", "--include-dashboard=false")
        self._ray_on(first, *head)
        self.rays[first].line(lambda line: "Ray runtime started" in line, seconds=_START_SECONDS)
        for name in others:
            self.start_node(name)
        for name in others:
            self.rays[name].line(lambda line: "Ray runtime started" in line, seconds=_START_SECONDS)

    def start_node(self, name: str, *options: str) -> None:
        """Makes a machine a node of the Ray cluster, for the first time or again; with two CPUs unless told."""
        head = f"{self.bed.address(self.bed.names[0])}:{PORT}"
        self._ray_on(name, "--address", head, *(options or ("--num-cpus", "2")))

    def _ray_on(self, name: str, *options: str) -> None:
        command = [*_RAY, "start", "--node-ip-address", self.bed.address(name), *_OPTIONS, *options]
        self.rays[name] = self.start(name, command)

    def atoll_command(self, *arguments: str) -> list[str]:
        return [*ATOLL, *arguments]

    def atoll(self, *arguments: str) -> Process:
        """A command of `atoll` on m0, which goes on."""
        return self.start("m0", [*ATOLL, *arguments])

    def up(self, islands: str, *options: str, machine: str = "m0") -> str:
        """The address of a cluster that is up, which was started on a machine."""
        command = [*ATOLL, "up", "--engine", "ray", "--islands", islands, *options]
        _, address = self.start(machine, command).line(is_address, seconds=120)
        return address

    def join_token(self, machine: str = "m0") -> str:
        """That of clients, of the cluster that was started on a machine."""
        shown = self.start(machine, ["cat", f"/tmp/atoll-{os.getuid()}/default/join"])
        shown.wait()
        return shown.said

    def script(self, machine: str, code: str, address: str, **more: str) -> Process:
        """A user's script on a machine."""
        command = [sys.executable, "-u", "-c", textwrap.dedent(code)]
        return self.start(machine, command, JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address, **more)

    def status(self) -> dict[str, Any]:
        asked = self.atoll("status", "--json")
        asked.wait()
        try:
            report: dict[str, Any] = json.loads(asked.said)
        except ValueError:
            return {"islands": [{"waits_for": "", "state": asked.said}], "machines": []}
        return report

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], seconds: float = 60.0) -> dict[str, Any]:
        """The first report of which this holds."""
        deadline = time.monotonic() + seconds
        while not holds(report := self.status()):
            assert time.monotonic() < deadline, json.dumps(report, indent=1)
            time.sleep(0.2)
        return report

    def drain(self, name: str, seconds: int) -> None:
        """Has Ray drain a node, as for a provider that takes the machine back after so many seconds."""
        look = self.start("m0", [sys.executable, "-c", textwrap.dedent(_NODES)])
        look.wait()
        node = json.loads(look.said.splitlines()[-1])[self.bed.address(name)]
        reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
        where = ("--address", f"{self.bed.address(self.bed.names[0])}:{PORT}", "--node-id", node)
        told = self.start("m0", [*_RAY, "drain-node", *where, *reason, "--deadline-remaining-seconds", str(seconds)])
        assert told.wait() == 0, told.said

    def has(self) -> list[str]:
        """The actors and placement groups that Ray has."""
        look = self.start("m0", [sys.executable, "-c", textwrap.dedent(_HAS)])
        look.wait()
        found: list[str] = json.loads(look.said.splitlines()[-1])
        return found

    def running(self, machine: str, text: str) -> list[int]:
        """The pids, on this side, of what runs on a machine with this in its command line."""
        space = os.readlink(f"/proc/{self.bed.pid(machine)}/ns/pid")
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{entry}/ns/pid") == space and text in Path(
                    f"/proc/{entry}/cmdline"
                ).read_text().replace("\0", " "):
                    found.append(int(entry))
            except OSError:
                continue
        return found

    def log(self) -> str:
        """What all processes have said, for a test that fails."""
        return "\n".join(f"--- {each.machine}: {each.process.args[-5:]}\n{each.said}" for each in self.processes)
