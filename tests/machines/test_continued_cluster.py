"""Test of a restart of the machine with controller and engine: `atoll up --continue` continues its cluster."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import ATOLL, MachineCluster, Process
from tests.machines.plugin import long, make_machines  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Computes on the devices of all islands, with arrays that only the hosts have.
LOOP = """
    import time
    import jax, jax.numpy as jnp

    add = jax.jit(lambda x: x + 1)
    arrays = [jax.device_put(jnp.zeros(4), device) for device in jax.devices()]
    step = 0
    while True:
        arrays = [add(x) for x in arrays]
        step += 1
        assert all(float(x.sum()) == 4 * step for x in arrays), step
        print("step", step)
        time.sleep(0.05)
"""


@pytest.fixture
def disk() -> Iterator[Path]:
    """Return a directory that survives the restart of a machine."""
    path = Path(tempfile.mkdtemp(prefix="atoll-disk-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def options(disk: Path) -> list[str]:
    kept = ["--journal", str(disk / "journal"), "--authority", str(disk / "authority"), "--continue"]
    return ["--lease", "4", *kept]


@pytest.fixture
def cluster(
    make_machines: Callable[..., Machines],  # noqa: F811
    disk: Path,
    options: list[str],
) -> Iterator[MachineCluster]:
    """Start a cluster with two islands of one host, on m1 and m2. The controller and the engine are on m0."""
    with MachineCluster(make_machines(3), "2x1x2", None, *options, ATOLL_KEY_FILE=str(disk / "key")) as cluster:
        for island, machine in enumerate(("m1", "m2")):
            cluster.host(machine, "--island", str(island))
        cluster.is_up()
        yield cluster
        print(cluster.log())


def up_again(cluster: MachineCluster, options: list[str]) -> Process:
    listen = ("--listen", cluster.address, "--engine", "hosts", "--islands", "2x1x2")
    again = cluster.start("m0", [*ATOLL, "up", "--foreground", *listen, *options])
    again.line(lambda line: line.removeprefix("tls://") == cluster.address, seconds=60)
    return again


def workers(cluster: MachineCluster) -> list[int]:
    """Return the process of each island's worker."""
    return [island["hosts"][0]["pid"] for island in cluster.status()["islands"]]


@long
def test_running_work_goes_on_when_the_machine_of_controller_and_engine_has_restarted(
    cluster: MachineCluster, options: list[str]
) -> None:
    script = cluster.script("m1", LOOP)
    script.line(lambda line: line.startswith("step 20"))
    before = workers(cluster)
    lost = time.monotonic()
    cluster.bed.reboot("m0")
    up_again(cluster, options)
    print(f"the cluster is up after {time.monotonic() - lost:.1f} s")
    at, _ = script.line(lambda line: line.startswith("step "), since=lost + 1.5)
    print(f"the script's next step after {at - lost:.1f} s")
    cluster.wait_until(lambda report: [each["state"] for each in report["islands"]] == ["ready", "ready"])
    assert workers(cluster) == before, "they were adopted"

    # From now on, the engine restarts processes that end.
    cluster.start("m2", ["kill", "-9", str(before[1])]).wait()
    cluster.wait_until(lambda report: report["islands"][1]["restarts"] > 0)
    cluster.wait_until(lambda report: [each["state"] for each in report["islands"]] == ["ready", "ready"])
    output = cluster.script("m2", "import jax; print(len(jax.devices()))")
    assert output.wait() == 0, output.output
    assert output.output.splitlines()[-1] == "4"


@long
def test_running_work_goes_on_when_only_the_engine_was_killed_and_the_cluster_is_started_again(
    cluster: MachineCluster, options: list[str]
) -> None:
    script = cluster.script("m1", LOOP)
    script.line(lambda line: line.startswith("step 20"))
    lost = time.monotonic()
    record = cluster.start("m0", ["cat", f"/tmp/atoll-{os.getuid()}/default/cluster.json"])
    record.wait()
    cluster.start("m0", ["kill", "-9", str(json.loads(record.output)["pid"])]).wait()
    cluster.up.process.wait(30)
    up_again(cluster, options)
    script.line(lambda line: line.startswith("step "), since=lost + 1.5)
    assert script.process.poll() is None
    assert json.loads(cluster.atoll("status", "--json").output)["sessions"]
