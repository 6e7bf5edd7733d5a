"""Test of the unmodified script of `make demo` on three machines: its losses are bitwise those on one machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import ROOT, Commands, MachineCluster, environment
from tests.machines.plugin import long, machines, make_machines  # noqa: F401
from tests.machines.ray_cluster import RayMachines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = int(os.environ.get("ATOLL_TEST_DEMO_STEPS", "40"))  # of the 300 steps of `make demo`
DEMO_SECONDS = 300.0

on_ray = pytest.mark.skipif(not os.environ.get("ATOLL_TEST_RAY"), reason="these take minutes: run them by `make ray`")


def losses(commands: Commands, machine: str, **where: str) -> list[str]:
    """Return the demo's exact loss after each step."""
    out = "/tmp/losses.json"
    command = [sys.executable, str(ROOT / "examples" / "gpt.py"), "--quiet", "--steps", str(STEPS), "--losses-out", out]
    demo = commands.start(machine, command, JAX_PLATFORMS="atoll", **where)
    assert demo.wait(DEMO_SECONDS) == 0, demo.output
    print(demo.output)
    shown = commands.start(machine, ["cat", out])
    shown.wait()
    found: list[str] = json.loads(shown.output)["losses"]
    assert len(found) == STEPS
    return found


@pytest.fixture
def on_one_machine(machines: Machines, program_cache: Path) -> Callable[[str], list[str]]:  # noqa: F811
    """Return the losses on a cluster of the engine `local`."""

    def run(islands: str) -> list[str]:
        with Commands(machines, environment(ATOLL_CACHE_DIR="off")) as commands:
            return losses(commands, "m0", ATOLL_ISLANDS=islands)

    return run


@long
@pytest.mark.parametrize("islands", ["1x1x8", "1x2x4"])
def test_the_demo_on_machines_with_host_agents(
    machines: Machines,  # noqa: F811
    on_one_machine: Callable[[str], list[str]],
    islands: str,
) -> None:
    with MachineCluster(machines, islands) as cluster:
        cluster.host("m1")
        if islands == "1x2x4":
            cluster.host("m2")
        cluster.is_up()
        there = losses(cluster, "m0", ATOLL_ADDRESS=cluster.address, ATOLL_JOIN=cluster.join)
        hosts = cluster.status()["islands"][0]["hosts"]
        assert {each["machine"] for each in hosts} <= {"m1", "m2"}
    assert there == on_one_machine(islands)


@on_ray
@pytest.mark.parametrize("islands", ["1x1x8", "1x2x4"])
def test_the_demo_on_machines_of_ray(
    machines: Machines,  # noqa: F811
    on_one_machine: Callable[[str], list[str]],
    islands: str,
) -> None:
    with RayMachines(machines) as ray:
        address = ray.up(islands)
        assert address.startswith("tls://")
        there = losses(ray, "m0", ATOLL_ADDRESS=address)
        hosts = ray.status()["islands"][0]["hosts"]
        assert {each["machine"] for each in hosts} <= {"m1", "m2"}
    assert there == on_one_machine(islands)
