"""Tests of a controller and a standby with an external lease on three machines, whose network is cut."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest

from atoll.leadership.kubernetes_lease import SERVICE_ACCOUNT
from atoll.leadership.lease_record import LEASE_SECONDS, RENEW_SECONDS
from tests.machines.bed import Machines
from tests.machines.clusters import Commands, MachineCluster, environment
from tests.machines.plugin import long, make_machines  # noqa: F401
from tests.machines.test_lost_engine import KEPT, LEASE, LOOP

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# m0 has controller and engine, m1 the standby, m2 and m3 hosts, and m4 the server of leases.
SERVER = "m4"
_PUT = 'mount -t tmpfs tmpfs /run && mkdir -p "$0" && cd "$0" && printf %s "$TOKEN" > token && printf %s "$CA" > ca.crt'


def lease_environment(commands: Commands, kind: str) -> dict[str, str]:
    """Start a server of leases, and return the environment of controllers. Make the other machines pods for it."""
    bed = commands.bed
    serve = [sys.executable, "-m", "tests.machines.lease_server", kind, bed.address(SERVER), "."]
    _, address = commands.start(SERVER, serve).line(lambda line: line.startswith(bed.address(SERVER)))
    if kind == "etcd":
        return {"ATOLL_LEADER_LEASE": f"etcd://{address}/atoll"}
    token, authority = (commands.start(SERVER, ["cat", name]) for name in ("token", "ca.crt"))
    for each in (token, authority):
        assert each.wait() == 0
    for machine in ("m0", "m1"):
        put = commands.start(machine, ["sh", "-c", _PUT, str(SERVICE_ACCOUNT)], TOKEN=token.output, CA=authority.output)
        assert put.wait() == 0, put.output
    host, _, port = address.rpartition(":")
    pod = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT_HTTPS": port}
    return {"ATOLL_LEADER_LEASE": "kubernetes://atoll/leader"} | pod


@pytest.fixture(params=["etcd", "kubernetes"])
def cluster(request: pytest.FixtureRequest, make_machines: Callable[..., Machines]) -> Iterator[MachineCluster]:  # noqa: F811
    bed = make_machines(5)
    options = ("--lease", str(LEASE), *KEPT)
    with Commands(bed, environment()) as commands:
        lease = lease_environment(commands, request.param)
        with MachineCluster(bed, "3x1x2", None, *options, **lease) as cluster:
            for island, machine in enumerate(("m0", "m2", "m3")):
                cluster.host(machine, "--island", str(island))
            cluster.is_up()
            yield cluster
            print(cluster.log())


def longest_step(cluster: MachineCluster, begun: float) -> float:
    """Return the seconds of the longest step of the script that ended after `begun`."""
    (script,) = (each for each in cluster.processes if each.output.startswith("step 1 "))
    return max(float(line.split()[2]) for at, line in script.lines if at > begun and line.startswith("step "))


@long
def test_a_controller_that_is_cut_off_from_the_lease_and_its_machine_is_replaced(cluster: MachineCluster) -> None:
    follower = cluster.standby("m1", *KEPT)
    script = cluster.script("m3", LOOP)
    script.line(lambda line: line.startswith("step 20 "))

    cut = time.monotonic()
    cluster.bed.drop_both("m0", SERVER)
    taken, _ = follower.line(lambda line: "takes over in term" in line)
    print(f"the standby takes over after {taken - cut:.1f} s")
    assert taken - cut > LEASE_SECONDS - RENEW_SECONDS
    script.line(lambda line: line.startswith("step "), since=taken + 1.0)
    print(f"the longest step took {longest_step(cluster, cut):.1f} s")
    cluster.bed.heal()
    # The engine stays, and its former controller ends.
    cluster.up.line(lambda line: "has taken over" in line)
    script.line(lambda line: line.startswith("step "), since=time.monotonic())
    assert script.process.poll() is None
    assert cluster.up.process.poll() is None


@long
def test_a_cluster_pauses_while_nobody_reaches_the_lease_and_nobody_takes_over(cluster: MachineCluster) -> None:
    follower = cluster.standby("m1", *KEPT)
    script = cluster.script("m3", LOOP)
    script.line(lambda line: line.startswith("step 20 "))

    cut = time.monotonic()
    cluster.bed.cut(SERVER)
    time.sleep(LEASE_SECONDS + 5.0)
    cluster.bed.join(SERVER)
    healed = time.monotonic()
    script.line(lambda line: line.startswith("step "), since=healed + 3.0)
    print(f"the longest step took {longest_step(cluster, cut):.1f} s, of a cut of {healed - cut:.1f} s")
    assert "takes over" not in follower.output
    assert cluster.up.process.poll() is None
    assert script.process.poll() is None
