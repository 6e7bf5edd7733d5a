"""Test of losing the machine with controller and engine: a standby on another machine takes over both roles."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import PORT, MachineCluster
from tests.machines.plugin import long, make_machines  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LEASE = 4.0
KEPT = ("--authority", "/tmp/authority", "--journal", "/tmp/journal")

# Computes on the devices of the islands on m2 and m3, with an array that only they have.
LOOP = """
    import time
    import jax, jax.numpy as jnp

    devices = [device for device in jax.devices() if device.slice_index in (1, 2)]
    add = jax.jit(lambda x: x + 1)
    arrays = [jax.device_put(jnp.zeros(4), device) for device in devices]
    step, last = 0, time.monotonic()
    while True:
        arrays = [add(x) for x in arrays]
        step += 1
        assert all(float(x.sum()) == 4 * step for x in arrays), step
        print("step", step, round(time.monotonic() - last, 2))
        last = time.monotonic()
        time.sleep(0.05)
"""


@pytest.fixture
def cluster(make_machines: Callable[..., Machines]) -> Iterator[MachineCluster]:  # noqa: F811
    """Start three islands of one host: on m0 beside controller and engine, on m2 and on m3. m1 is a spare."""
    bed = make_machines(4)
    with MachineCluster(bed, "3x1x2", None, "--lease", str(LEASE), *KEPT) as cluster:
        for island, machine in enumerate(("m0", "m2", "m3")):
            cluster.host(machine, "--island", str(island))
        cluster.is_up()
        yield cluster
        print(cluster.log())


def wait_until(cluster: MachineCluster, holds: Callable[[dict[str, Any]], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        output = cluster.atoll("status", "--json", machine="m1").output
        report = json.loads(output) if output.startswith("{") else {}
        if report and holds(report):
            return
        assert time.monotonic() < deadline, output
        time.sleep(0.3)


def workers(report: dict[str, Any]) -> list[int]:
    """Return the process of each island's worker."""
    return [island["hosts"][0]["pid"] for island in report["islands"]]


def states(report: dict[str, Any]) -> list[str]:
    return [island["state"] for island in report["islands"]]


@long
def test_a_standby_takes_the_role_of_the_engine_and_running_work_goes_on(cluster: MachineCluster) -> None:
    bed = cluster.bed
    spare = cluster.host("m1")
    spare.line(lambda line: "has joined" in line)
    follower = cluster.standby("m1", *KEPT)
    script = cluster.script("m3", LOOP)
    script.line(lambda line: line.startswith("step 20 "))
    before = workers(cluster.status())

    lost = time.monotonic()
    bed.reboot("m0")
    follower.line(lambda line: "takes over in term" in line)
    at, _ = script.line(lambda line: line.startswith("step "), since=lost + 1.5)
    print(f"the script's next step after {at - lost:.1f} s")
    taken, _ = follower.line(lambda line: "this process takes its role" in line)
    print(f"the spare engine after {taken - lost:.1f} s")
    cluster.address, cluster.known_as = f"{bed.address('m1')}:{PORT}", f"m1:{PORT}"
    wait_until(cluster, lambda report: states(report) == ["ready", "ready", "ready"])
    print(f"all islands after {time.monotonic() - lost:.1f} s")

    report = json.loads(cluster.atoll("status", "--json", machine="m1").output)
    after = workers(report)
    assert after[1:] == before[1:], "these workers were adopted"
    script.line(lambda line: line.startswith("step "), since=time.monotonic())
    assert script.process.poll() is None

    # From now on, the engine restarts processes that end.
    cluster.start("m2", ["kill", "-9", str(after[1])]).wait()
    wait_until(cluster, lambda report: states(report)[1] != "ready" or report["islands"][1]["restarts"] > 0)
    wait_until(cluster, lambda report: states(report) == ["ready", "ready", "ready"])
    output = cluster.script("m2", "import jax; print(len(jax.devices()))")
    assert output.wait() == 0, output.output
    assert output.output.splitlines()[-1] == "6"


@long
def test_running_work_goes_on_soon_after_the_machine_of_the_controller_is_cut_off(cluster: MachineCluster) -> None:
    cluster.host("m1").line(lambda line: "has joined" in line)
    follower = cluster.standby("m1", *KEPT)
    script = cluster.script("m3", LOOP)
    script.line(lambda line: line.startswith("step 20 "))

    lost = time.monotonic()
    cluster.bed.cut("m0")
    taken, _ = follower.line(lambda line: "takes over in term" in line)
    print(f"the standby takes over after {taken - lost:.1f} s")
    _, line = script.line(lambda line: line.startswith("step ") and float(line.split()[2]) > 4.0, since=taken)
    print(f"the script's longest step took {line.split()[2]} s")
    # Peers are silent for 5 s before they dial. They try the old address for 1 s, before and after the takeover.
    assert float(line.split()[2]) < 10.0
