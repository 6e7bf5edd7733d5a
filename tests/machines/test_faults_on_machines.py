"""Tests of faults of links, workers and clients' machines: which processes notice, when, and what continues."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.cluster.processes.leases import CLIENT_LEASES
from tests.machines.bed import Machines
from tests.machines.clusters import MachineCluster, Process
from tests.machines.plugin import long, machines, make_machines  # noqa: F401
from tests.machines.test_hosts_on_machines import LEASE, LOOP, worker_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CLIENT_LEASE = CLIENT_LEASES * LEASE

# Prints how often per second it got a sum from the devices of the second island. It sleeps in between, like a stage of
# half a second that needs no CPU, because the failed island's worker restarts on the same CPUs.
RATE = """
    import time
    import jax, jax.numpy as jnp

    island = [device for device in jax.devices() if device.slice_index == 1]
    sharding = jax.NamedSharding(jax.make_mesh((len(island),), ("x",), devices=island), jax.P("x"))
    total = jax.jit(lambda x: jnp.sum(x * x))
    x = jax.device_put(jnp.arange(8.0), sharding)
    while True:
        start, count = time.monotonic(), 0
        while time.monotonic() - start < 1:
            assert float(total(x)) == 140
            time.sleep(0.5)
            count += 1
        print("rate", count / (time.monotonic() - start))
"""

# 256 KiB in both directions, which take four seconds at 1 Mbit/s.
LARGE = """
    import jax, numpy as np

    expected = np.arange(32 * 1024, dtype=np.float32)
    for number in range(3):
        x = jax.device_put(expected + number, jax.devices()[number % len(jax.devices())])
        print("right" if (np.asarray(x + 1) == expected + number + 1).all() else "WRONG")
"""

# An array that only its host has, fetched repeatedly.
FETCH = """
    import time
    import jax, jax.numpy as jnp

    add = jax.jit(lambda x: x + 1)
    x = jax.device_put(jnp.zeros(8), jax.devices()[-1])
    while True:
        x = add(x)
        print("got", float(x[0]))
        time.sleep(0.1)
"""


Make = Callable[..., MachineCluster]


@pytest.fixture
def make_cluster(make_machines: Callable[..., Machines], program_cache: Path) -> Iterator[Make]:  # noqa: F811
    made: list[MachineCluster] = []

    def make(islands: str, *places: str) -> MachineCluster:
        """Start a cluster whose hosts are on these machines, in this order. m3 is available for clients."""
        cluster = MachineCluster(make_machines(4), islands, None, "--lease", str(LEASE))
        made.append(cluster)
        for rank, machine in enumerate(places):
            cluster.host(machine, "--rank", str(rank))
        cluster.is_up()
        return cluster

    yield make
    for each in made:
        print(each.atoll("status").output, each.log(), sep="\n")
        each.__exit__()


def looping(cluster: MachineCluster, machine: str = "m3") -> Process:
    script = cluster.script(machine, LOOP)
    script.line(lambda line: line == "kept 140.0")
    return script


def agent_on(cluster: MachineCluster, machine: str) -> Process:
    return next(each for each in cluster.processes if each.machine == machine and "host" in each.process.args)


@long
def test_a_host_that_the_controller_alone_cannot_reach_is_lost_and_back_soon_after_it_is_reached(
    make_cluster: Make,
) -> None:
    cluster = make_cluster("1x2x2", "m1", "m2")
    script = looping(cluster)
    struck = time.monotonic()
    cluster.bed.drop_both("m0", "m2")
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    print("lost after", lost - struck, text)
    assert "host 1 of island 0" in text
    assert "on m2" in text
    assert lost - struck < LEASE + 3
    time.sleep(LEASE)
    cluster.bed.heal()
    healed = time.monotonic()
    back, _ = script.line(lambda line: line == "kept 140.0", healed)
    print("back after", back - healed)
    assert back - healed < cluster.restart_seconds(5)


@long
def test_a_worker_that_is_stopped_is_named_and_when_it_goes_on_another_has_its_place(make_cluster: Make) -> None:
    cluster = make_cluster("1x2x2", "m1", "m2")
    script = looping(cluster)
    worker = worker_of(agent_on(cluster, "m2"))
    struck = time.monotonic()
    worker.suspend()
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    print("lost after", lost - struck, text)
    assert "host 1 of island 0 has not answered" in text
    assert lost - struck < LEASE + 3
    back, _ = script.line(lambda line: line == "kept 140.0", lost)
    print("back after", back - lost)
    assert not worker.is_running()
    assert "refused" not in script.output


@long
def test_another_island_runs_on_while_one_is_lost_and_back(make_cluster: Make) -> None:
    cluster = make_cluster("2x1x2", "m1", "m2")
    script = cluster.script("m3", RATE)
    for _ in range(5):
        script.line(lambda line: line.startswith("rate"), time.monotonic())
    struck = time.monotonic()
    cluster.bed.cut("m1")
    cluster.wait_until(lambda report: report["islands"][0]["state"] == "restarting", LEASE + 5)
    cluster.bed.join("m1")
    cluster.wait_until(lambda report: report["islands"][0]["state"] == "ready", 20)
    over = time.monotonic()
    script.line(lambda line: line.startswith("rate"), over + 1)
    rates = [(at, float(line.split()[1])) for at, line in script.lines if line.startswith("rate")]
    before = statistics.median(rate for at, rate in rates if at < struck)
    meanwhile = [rate for at, rate in rates if struck < at < over]
    print(f"{before:.3f} a second before, and meanwhile {statistics.median(meanwhile):.3f}: {meanwhile}")
    assert len(meanwhile) >= 5
    assert statistics.median(meanwhile) >= 0.95 * before
    assert min(meanwhile) > 0
    assert script.process.poll() is None


@long
@pytest.mark.parametrize("fault", ["1 Mbit/s", "200 ms"])
def test_a_slow_link_loses_nothing(make_cluster: Make, fault: str) -> None:
    cluster = make_cluster("1x2x1", "m1", "m2")
    workers = [worker_of(agent_on(cluster, machine)).pid for machine in ("m1", "m2")]
    script = cluster.script("m3", LOOP)
    script.line(lambda line: line == "kept 140.0")
    if fault == "1 Mbit/s":
        cluster.bed.limit("m2", "1mbit")
    else:
        cluster.bed.delay("m2", 200)
    slow = time.monotonic()
    large = cluster.script("m3", LARGE)
    assert large.wait(120) == 0, large.output
    assert large.output.split() == ["right"] * 3
    script.line(lambda line: line == "kept 140.0", slow + 2 * LEASE)
    assert "lost" not in script.output
    assert [worker_of(agent_on(cluster, machine)).pid for machine in ("m1", "m2")] == workers


@long
def test_the_session_of_a_client_whose_machine_is_gone_ends_and_frees_what_it_had(make_cluster: Make) -> None:
    cluster = make_cluster("1x2x1", "m1", "m2")
    looping(cluster)
    other = looping(cluster, "m0")
    struck = time.monotonic()
    cluster.bed.cut("m3")  # permanently: no report about its end arrives
    cluster.wait_until(lambda report: len(report["sessions"]) == 1, CLIENT_LEASE + 10)
    print("its session was over after", time.monotonic() - struck)
    assert time.monotonic() - struck < CLIENT_LEASE + 5
    other.line(lambda line: line == "kept 140.0", time.monotonic())
    assert "lost" not in other.output


@long
@pytest.mark.parametrize(("sender", "receiver"), [("m3", "m0"), ("m0", "m3")])
def test_a_client_that_is_cut_off_from_the_controller_is_told_so_and_its_session_ends(
    make_cluster: Make, sender: str, receiver: str
) -> None:
    cluster = make_cluster("1x2x1", "m1", "m2")
    script = looping(cluster)
    struck = time.monotonic()
    cluster.bed.drop(sender, receiver)
    lost, text = script.line(lambda line: line.startswith("lost"), struck, seconds=CLIENT_LEASE + 15)
    print("told after", lost - struck, text)
    assert "the Atoll controller is gone: it was silent for" in text
    assert lost - struck < CLIENT_LEASE + 5
    cluster.wait_until(lambda report: not report["sessions"], CLIENT_LEASE + 10)
    assert [island["restarts"] for island in cluster.status()["islands"]] == [0]


@long
def test_a_client_that_is_cut_off_from_a_data_port_is_told_which(make_cluster: Make) -> None:
    cluster = make_cluster("1x2x1", "m1", "m2")
    script = cluster.script("m3", FETCH)
    script.line(lambda line: line == "got 1.0")
    struck = time.monotonic()
    cluster.bed.drop_both("m2", "m3")
    status = script.wait(LEASE + 20)
    reported = time.monotonic()
    print("told after", reported - struck, script.output[-1000:])
    assert status == 1
    assert "the data port of host 1 is gone: the other side was silent for" in script.output
    assert reported - struck < LEASE + 8
    assert [island["restarts"] for island in cluster.status()["islands"]] == [0]


@long
def test_what_a_host_had_sent_to_a_client_is_an_error_there_when_the_host_is_lost_before_it_came(
    make_cluster: Make,
) -> None:
    cluster = make_cluster("1x1x2", "m1")
    script = looping(cluster)
    cluster.bed.drop("m1", "m3")  # the contents are sent, and the controller learns that they were
    time.sleep(1)
    struck = time.monotonic()
    worker_of(agent_on(cluster, "m1")).kill()
    lost, text = script.line(lambda line: line.startswith("lost"), struck, seconds=LEASE)
    print("told after", lost - struck, text)
    assert "host 0 is gone, and data that it had sent to the client was still on the way" in text
