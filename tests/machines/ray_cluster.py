"""A Ray cluster on simulated machines, started with `ray start` on each machine, as a user does."""

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
from tests.machines.machine_clock import Deadline

PORT = 6379
_RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
# Ray starts several processes on each machine. This only ends a start that hangs.
_START_SECONDS = 300.0
_OPTIONS = ("--disable-usage-stats", "--object-store-memory", "80000000", "--block")

# Prints Ray's actors and placement groups. It runs as a separate driver.
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
    """Return whether this is the line of `atoll up` with the address of its cluster."""
    return line.removeprefix("tls://").startswith("10.77.")


class RayMachines(Commands):
    """Ray's head on m0, which offers no CPUs, and one node on each other machine."""

    def __init__(self, bed: Machines) -> None:
        # Ray waits a minute for dead nodes, and its nodes wait another minute for a dead head.
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
        """Add a machine to the Ray cluster, for the first time or again, with two CPUs by default."""
        head = f"{self.bed.address(self.bed.names[0])}:{PORT}"
        self._ray_on(name, "--address", head, *(options or ("--num-cpus", "2")))

    def _ray_on(self, name: str, *options: str) -> None:
        command = [*_RAY, "start", "--node-ip-address", self.bed.address(name), *_OPTIONS, *options]
        self.rays[name] = self.start(name, command)

    def atoll_command(self, *arguments: str) -> list[str]:
        return [*ATOLL, *arguments]

    def atoll(self, *arguments: str) -> Process:
        """Start an `atoll` command on m0, without waiting for its end."""
        return self.start("m0", [*ATOLL, *arguments])

    def up(self, islands: str, *options: str, machine: str = "m0") -> str:
        """Return the address of the cluster that a machine started, after it is up."""
        command = [*ATOLL, "up", "--engine", "ray", "--islands", islands, *options]
        _, address = self.start(machine, command).line(is_address, seconds=120)
        return address

    def join_token(self, machine: str = "m0") -> str:
        """Return the clients' join token of the cluster that a machine started."""
        shown = self.start(machine, ["cat", f"/tmp/atoll-{os.getuid()}/default/join"])
        shown.wait()
        return shown.output

    def script(self, machine: str, code: str, address: str, **more: str) -> Process:
        """Start a user's script on a machine."""
        command = [sys.executable, "-u", "-c", textwrap.dedent(code)]
        return self.start(machine, command, JAX_PLATFORMS="atoll", ATOLL_ADDRESS=address, **more)

    def status(self) -> dict[str, Any]:
        asked = self.atoll("status", "--json")
        asked.wait()
        try:
            report: dict[str, Any] = json.loads(asked.output)
        except ValueError:
            return {"islands": [{"waits_for": "", "state": asked.output}], "machines": []}
        return report

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], seconds: float = 60.0) -> dict[str, Any]:
        """Return the first report for which `holds` is true, within so many seconds of a `MachineClock`."""
        deadline = Deadline(seconds)
        while not holds(report := self.status()):
            assert not deadline.is_over, json.dumps(report, indent=1)
            time.sleep(0.2)
        return report

    def drain(self, name: str, seconds: int) -> None:
        """Let Ray drain a node, as for a provider that takes the machine back after this many seconds."""
        look = self.start("m0", [sys.executable, "-c", textwrap.dedent(_NODES)])
        look.wait()
        node = json.loads(look.output.splitlines()[-1])[self.bed.address(name)]
        reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
        where = ("--address", f"{self.bed.address(self.bed.names[0])}:{PORT}", "--node-id", node)
        drain = self.start("m0", [*_RAY, "drain-node", *where, *reason, "--deadline-remaining-seconds", str(seconds)])
        assert drain.wait() == 0, drain.output

    def has(self) -> list[str]:
        """Return Ray's actors and placement groups."""
        look = self.start("m0", [sys.executable, "-c", textwrap.dedent(_HAS)])
        look.wait()
        found: list[str] = json.loads(look.output.splitlines()[-1])
        return found

    def running(self, machine: str, text: str) -> list[int]:
        """Return the pids in this namespace of a machine's processes with this text in their command lines."""
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
        """Return the output of all processes, for a failed test."""
        return "\n".join(f"--- {each.machine}: {each.process.args[-5:]}\n{each.output}" for each in self.processes)
