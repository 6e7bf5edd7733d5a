"""Tests of machines that leave, come back, or come back in a role that they no longer have."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import MachineCluster
from tests.machines.plugin import long, machines, make_machines  # noqa: F401
from tests.machines.test_hosts_on_machines import LEASE, LOOP, worker_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Arrays on the devices of both islands, one after the other.
ISLANDS = """
    import time
    import jax, jax.numpy as jnp

    arrays = [jax.device_put(jnp.arange(4.0) + number, device) for number, device in enumerate(jax.devices())]
    double = jax.jit(lambda x: 2 * x)
    while True:
        print("sums", [float(double(each).sum()) for each in arrays])
        time.sleep(0.1)
"""
SUMS = "sums [12.0, 20.0, 28.0, 36.0]"


@pytest.fixture
def make_cluster(make_machines: Callable[..., Machines]) -> Iterator[Callable[..., MachineCluster]]:  # noqa: F811
    made: list[MachineCluster] = []

    def make(count: int, islands: str, *options: str, secured: bool = True) -> MachineCluster:
        made.append(
            MachineCluster(make_machines(count), islands, None, "--lease", str(LEASE), *options, secured=secured)
        )
        return made[-1]

    yield make
    for each in made:
        print(each.log())
        each.__exit__()


@long
def test_what_is_on_a_machine_that_leaves_is_moved_to_another_island_within_its_grace(
    make_cluster: Callable[..., MachineCluster],
) -> None:
    cluster = make_cluster(3, "2x1x2")
    first, second = cluster.host("m1", "--rank", "0"), cluster.host("m2", "--rank", "1")
    cluster.is_up()
    script = cluster.script("m0", ISLANDS)
    script.line(lambda line: line.startswith("sums"))
    struck = time.monotonic()
    first.signal(signal.SIGTERM)
    assert first.wait(20) == 0
    assert time.monotonic() - struck < 15
    script.line(lambda line: line == SUMS, time.monotonic())
    assert {line for _, line in script.lines} == {SUMS}
    report = cluster.status()
    assert [each["state"] for each in report["islands"]] == ["drained", "ready"]
    assert [each["name"] for each in report["machines"]] == ["m2"]
    assert second.process.poll() is None
    # The island returns with the machine, and the next script can use it.
    cluster.host("m1", "--rank", "0")
    cluster.wait_until(lambda report: [each["state"] for each in report["islands"]] == ["ready", "ready"])
    assert len(cluster.status()["islands"][0]["hosts"]) == 1
    script.line(lambda line: line == SUMS, time.monotonic())
    assert {line for _, line in script.lines} == {SUMS}


@long
def test_what_has_nowhere_to_go_when_its_machine_leaves_goes_as_soon_as_there_is_room(
    make_cluster: Callable[..., MachineCluster],
) -> None:
    cluster = make_cluster(3, "2x1x2")
    first, second = cluster.host("m1", "--rank", "0", "--grace", "90"), cluster.host("m2", "--rank", "1")
    cluster.is_up()
    first_island = LOOP.replace("(len(jax.devices()),), ", "(2,), devices=jax.devices()[:2], axis_names=")
    script = cluster.script("m0", first_island)
    script.line(lambda line: line == "kept 140.0")
    second.signal(signal.SIGKILL)
    cluster.wait_until(lambda report: report["islands"][1]["state"] == "restarting")
    struck = time.monotonic()
    first.signal(signal.SIGTERM)
    cluster.wait_until(lambda report: "the only one that is ready" in cluster.log())
    cluster.host("m2", "--rank", "1")
    assert first.wait(60) == 0
    assert time.monotonic() - struck < 60
    script.line(lambda line: line == "kept 140.0", time.monotonic())
    assert not [line for _, line in script.lines if line.startswith("lost")]
    assert [each["state"] for each in cluster.status()["islands"]] == ["drained", "ready"]


@long
def test_where_nothing_can_be_moved_a_machine_that_leaves_goes_on_for_its_grace_and_a_spare_follows(
    make_cluster: Callable[..., MachineCluster],
) -> None:
    cluster = make_cluster(3, "1x1x2")
    first = cluster.host("m1", "--grace", "2")
    cluster.is_up()
    cluster.host("m2")
    script = cluster.script("m0", LOOP)
    script.line(lambda line: line == "kept 140.0")
    struck = time.monotonic()
    first.signal(signal.SIGTERM)
    assert first.wait(20) == 0
    ended = time.monotonic()
    assert 2 <= ended - struck < 6
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    assert "m1 left: SIGTERM" in text
    assert "SIGTERM: leaving; the cluster has 2 s to move what is on host 0 of island 0" in first.output
    script.line(lambda line: line == "kept 140.0", lost)
    (host,) = cluster.status()["islands"][0]["hosts"]
    assert host["machine"] == "m2"


@long
def test_an_idle_island_whose_machine_leaves_starts_on_a_spare_at_once(
    make_cluster: Callable[..., MachineCluster],
) -> None:
    cluster = make_cluster(4, "1x2x2")
    cluster.host("m1", "--rank", "0")
    second = cluster.host("m2", "--grace", "60")
    cluster.is_up(120.0)
    third = cluster.host("m3")
    cluster.wait_until(lambda report: any(each["name"] == "m3" for each in report["machines"]))
    second.signal(signal.SIGTERM)
    assert second.wait(45) == 0, "before its grace is over"
    cluster.wait_until(lambda report: report["islands"][0]["state"] == "ready")
    assert [each["machine"] for each in cluster.status()["islands"][0]["hosts"]] == ["m1", "m3"]
    assert "SIGTERM: leaving" in second.output
    assert "this machine is host 1 of island 0 (rank 1 of 2): its worker starts" in third.output
    assert [each["kind"] for each in cluster.status()["events"] if each["kind"] == "refused"] == []


@long
def test_a_frozen_machine_is_lost_and_takes_no_part_when_it_thaws(
    make_cluster: Callable[..., MachineCluster],
) -> None:
    cluster = make_cluster(4, "1x2x2")
    cluster.host("m1", "--rank", "0")
    second = cluster.host("m2")
    cluster.is_up()
    cluster.host("m3")
    script = cluster.script("m0", LOOP)
    script.line(lambda line: line == "kept 140.0")
    worker = worker_of(second)
    frozen = [worker, psutil.Process(second.pid)]
    struck = time.monotonic()
    for process in frozen:
        process.suspend()
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    assert lost - struck < LEASE + 3
    assert "host 1 of island 0" in text
    back, _ = script.line(lambda line: line == "kept 140.0", lost)
    for process in reversed(frozen):
        process.resume()
    thawed = time.monotonic()
    worker.wait(LEASE)
    cluster.wait_until(lambda report: {"name": "m2", "state": "free"}.items() <= report["machines"][-1].items())
    script.line(lambda line: line == "kept 140.0", thawed + 2)
    assert not [line for at, line in script.lines if at > back and line.startswith("lost")]
    hosts = cluster.status()["islands"][0]["hosts"]
    assert [each["machine"] for each in hosts] == ["m1", "m3"]


def test_nothing_is_left_on_any_machine_when_a_cluster_ends(make_cluster: Callable[..., MachineCluster]) -> None:
    cluster = make_cluster(3, "2x1x1")
    hosts = [cluster.host("m1"), cluster.host("m2", "--stay")]
    cluster.is_up()
    workers = [worker_of(host) for host in hosts]
    assert "has ended" in cluster.atoll("down").output
    assert hosts[0].wait(10) == 0
    for worker in workers:
        worker.wait(5)
    assert hosts[1].process.poll() is None  # it should have waited for the next cluster
    assert psutil.Process(hosts[1].pid).children() == []
    for host in ("m1", "m2"):
        listing = cluster.start(host, ["sh", "-c", "ls /tmp /dev/shm"])
        listing.wait()
        assert "atoll" not in listing.output


@long
def test_a_controller_that_is_killed_takes_the_workers_with_it_and_the_next_one_gets_the_machines(
    make_cluster: Callable[..., MachineCluster],
) -> None:
    # With TLS, the next one is another cluster, which does not accept the first one's join token.
    cluster = make_cluster(2, "1x1x1", secured=False)
    host = cluster.host("m1")
    cluster.is_up()
    worker = worker_of(host)
    engine = next(
        each
        for each in psutil.Process(cluster.up.pid).children()
        if "atoll.engines.engine_main" in " ".join(each.cmdline())
    )
    for process in [*engine.children(), engine]:
        os.kill(process.pid, signal.SIGKILL)
    worker.wait(LEASE + 4)
    cluster.up.wait(20)
    with MachineCluster(cluster.bed, "1x1x1", secured=False) as following:
        following.is_up()
        (listed,) = following.status()["machines"]
        assert listed["name"] == "m1"
        assert host.process.poll() is None  # it also ends when the next cluster ends regularly
