"""Tests of clusters with hosts on several machines: how they start, what a user's script sees, and their failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.machines.bed import SECONDS, Machines, run
from tests.machines.clusters import MachineCluster, Process
from tests.machines.plugin import long, machines, make_machines  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LEASE = 4.0

# A user's script that computes a sum on all devices several times per second, as long as it runs.
LOOP = """
    import time
    import jax, jax.numpy as jnp

    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    total = jax.jit(lambda x: jnp.sum(x * x))
    kept = jax.device_put(jnp.arange(8.0), sharding)
    while True:
        try:
            print("kept", float(total(kept)))
        except jax.errors.JaxRuntimeError as error:
            print("lost", str(error).replace(chr(10), " "))
            kept = jax.device_put(jnp.arange(8.0), sharding)
        time.sleep(0.1)
"""


@pytest.fixture
def four(make_machines: Callable[..., Machines]) -> Machines:  # noqa: F811
    """Return four machines: m0 has the controller, m1 and m2 have hosts, and m3 has the client."""
    return make_machines(4)


@pytest.fixture
def cluster(four: Machines, program_cache: Path) -> Iterator[MachineCluster]:
    """Start an island of two hosts on m1 and m2, for a script on m3."""
    with MachineCluster(four, "1x2x2", None, "--lease", str(LEASE)) as cluster:
        yield cluster
        print(cluster.atoll("status").output, cluster.log(), sep="\n")  # pytest shows this output if the test fails


def started(cluster: MachineCluster) -> tuple[Process, Process, Process]:
    """Start the two host agents, and a script that computes."""
    first, second = cluster.host("m1", "--rank", "0"), cluster.host("m2", "--rank", "1")
    cluster.is_up()
    script = cluster.script("m3", LOOP)
    script.line(lambda line: line == "kept 140.0")
    return first, second, script


def worker_of(host: Process) -> psutil.Process:
    (worker,) = psutil.Process(host.pid).children()
    return worker


def test_a_killed_worker_is_started_again_where_it_was(cluster: MachineCluster) -> None:
    first, _, script = started(cluster)
    struck = time.monotonic()
    worker_of(first).kill()
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    assert "killed by SIGKILL" in text or "is gone" in text
    assert "on m1" in text
    script.line(lambda line: line == "kept 140.0", lost)


@long
def test_hosts_listen_only_on_ports_that_the_system_chooses(four: Machines, cluster: MachineCluster) -> None:
    """Guides tell users to allow these ports in a firewall. No other process of the machine listens on a port."""
    low, high = 40960, 41023
    for name in ("m1", "m2"):
        range_of_ports = f"echo {low} {high} > /proc/sys/net/ipv4/ip_local_port_range"
        assert four.popen(name, ["sh", "-c", range_of_ports]).wait(SECONDS) == 0
    started(cluster)  # the hosts and the script have connected to one another
    for name in ("m1", "m2"):
        rows = run("ss", "--listening", "--tcp", "--numeric", "--no-header", pid=four.pid(name)).splitlines()
        ports = [int(row.split()[3].rpartition(":")[2]) for row in rows]
        assert ports
        assert [port for port in ports if not low <= port <= high] == []


@long
def test_an_agents_worker_ends_with_it_and_a_spare_machine_takes_its_place(cluster: MachineCluster) -> None:
    first, second, script = started(cluster)
    spare = cluster.host("m3")
    cluster.wait_until(lambda report: any(each["state"] == "free" for each in report["machines"]))
    worker = worker_of(second)
    struck = time.monotonic()
    os.kill(second.pid, signal.SIGKILL)
    worker.wait(30)
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    assert "on m2" in text
    script.line(lambda line: line == "kept 140.0", lost)
    hosts = cluster.status()["islands"][0]["hosts"]
    assert [each["machine"] for each in hosts] == ["m1", "m3"]
    assert spare.process.poll() is None
    assert first.process.poll() is None


@long
def test_silence_shorter_than_the_lease_loses_nothing(cluster: MachineCluster) -> None:
    first, second, script = started(cluster)
    workers = worker_of(first).pid, worker_of(second).pid
    cluster.bed.cut("m2")
    time.sleep(LEASE - 2)
    cluster.bed.join("m2")
    joined = time.monotonic()
    script.line(lambda line: line == "kept 140.0", joined + 1)
    assert "lost" not in script.output
    assert (worker_of(first).pid, worker_of(second).pid) == workers


@long
def test_a_machine_that_is_silent_for_longer_is_lost_by_name_and_its_island_is_back_when_it_is(
    cluster: MachineCluster,
) -> None:
    _, second, script = started(cluster)
    worker = worker_of(second)
    struck = time.monotonic()
    cluster.bed.cut("m2")
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    assert "host 1 of island 0" in text
    assert "on m2" in text
    assert lost - struck < LEASE + 3
    worker.wait(LEASE + 4)  # by itself, because nothing can reach it
    waits = cluster.wait_until(lambda report: report["islands"][0]["waits_for"])["islands"][0]["waits_for"]
    assert waits.startswith("waits for 1 of 2 hosts: rank 1")
    cluster.bed.join("m2")
    joined = time.monotonic()
    back, _ = script.line(lambda line: line == "kept 140.0", joined)
    assert back - joined < cluster.restart_seconds(5)


@long
@pytest.mark.parametrize(("machine", "rank"), [("m1", "0"), ("m2", "1")])  # the hosts meet at the first one
def test_a_machine_that_was_rebooted_takes_its_place_again(cluster: MachineCluster, machine: str, rank: str) -> None:
    _, _, script = started(cluster)
    struck = time.monotonic()
    cluster.bed.reboot(machine)
    cluster.host(machine, "--rank", rank)
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    assert "of island 0" in text
    assert lost - struck < LEASE + 3
    script.line(lambda line: line == "kept 140.0", lost)
    assert "refused" not in script.output  # no program is blamed


@long
@pytest.mark.parametrize(("sender", "receiver"), [("m2", "m0"), ("m0", "m2")])
def test_a_machine_whose_packets_are_lost_one_way_is_lost_and_ends_its_worker(
    cluster: MachineCluster, sender: str, receiver: str
) -> None:
    _, second, script = started(cluster)
    worker = worker_of(second)
    struck = time.monotonic()
    cluster.bed.drop(sender, receiver)
    lost, text = script.line(lambda line: line.startswith("lost"), struck, seconds=LEASE + 6)
    assert "host 1 of island 0" in text
    assert "on m2" in text
    worker.wait(LEASE + 4)
    cluster.bed.heal()
    healed = time.monotonic()
    back, _ = script.line(lambda line: line == "kept 140.0", max(lost, healed))
    assert back - healed < cluster.restart_seconds(5)
