"""Tests of clusters on Ray, on machines with one real Ray node each: how they start, and what recovers after each
fault.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import Process
from tests.machines.plugin import machines, make_machines  # noqa: F401
from tests.machines.ray_cluster import RayMachines, is_address
from tests.machines.test_hosts_on_machines import LEASE, LOOP
from tests.machines.test_leaving import ISLANDS, SUMS

pytest.importorskip("ray", reason="Ray is not installed: pip install 'atoll[ray]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not os.environ.get("ATOLL_TEST_RAY"), reason="these take minutes: run them by `make ray`"),
]

# The signal with which Ray kills an actor that it will restart.
KILL = """
import ray
ray.init("auto", namespace="atoll", log_to_driver=False, logging_level="ERROR")
ray.kill(ray.get_actor("atoll-default"), no_restart=False)
"""

# Sums of one array over the devices of two islands, which the hosts compute with a collective.
OVER_ISLANDS = """
    import time
    import jax, jax.numpy as jnp, numpy as np

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    assert [device.slice_index for device in mesh.devices] == [0, 0, 1, 1]
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    squares = lambda x: jax.lax.psum((x * x).sum(), "x")
    total = jax.jit(jax.shard_map(squares, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P()))
    kept = jax.device_put(jnp.arange(8.0), sharding)
    while True:
        try:
            print("kept", float(total(kept)))
        except jax.errors.JaxRuntimeError as error:
            print("lost", str(error).replace(chr(10), " "))
            kept = jax.device_put(jnp.arange(8.0), sharding)
        time.sleep(0.1)
"""

UP = ("up", "--engine", "ray", "--lease", str(LEASE), "--islands")


@pytest.fixture
def ray(machines: Machines) -> Iterator[RayMachines]:  # noqa: F811
    """Start Ray's head on m0, and a node with two CPUs on each of m1 and m2."""
    with RayMachines(machines) as ray:
        yield ray
        print(ray.log())  # pytest shows this output if the test fails


def up(ray: RayMachines, islands: str, *options: str) -> str:
    """Start a cluster with a short lease. Return its address after it is up."""
    return ray.up(islands, "--lease", str(LEASE), *options)


def is_back(script: Process, after: float) -> float:
    """Return when the script worked again after it had lost something."""
    lost, _ = script.line(lambda line: line.startswith("lost"), after)
    return script.line(lambda line: line == "kept 140.0", lost, seconds=90)[0]


def test_an_island_over_two_nodes_outlives_its_actors_agents_and_workers_and_leaves_nothing(ray: RayMachines) -> None:
    script = ray.script("m0", LOOP, up(ray, "1x2x2"))
    script.line(lambda line: line == "kept 140.0")
    assert sorted(each["machine"] for each in ray.status()["islands"][0]["hosts"]) == ["m1", "m2"]
    for text, kind in (
        ("ray::HostActor", signal.SIGKILL),
        ("operate.command host", signal.SIGKILL),
        ("operate.command host", signal.SIGSTOP),  # its actor misses it, and starts another one
        ("atoll.worker.worker_main", signal.SIGKILL),
    ):
        (pid,) = ray.running("m1", text)
        struck = time.monotonic()
        os.kill(pid, kind)
        assert is_back(script, struck) - struck < 60, text
        print(f"{kind.name} to {text}: back after {is_back(script, struck) - struck:.1f} s")
        assert len(ray.running("m1", "atoll.worker.worker_main")) == 1
    assert "refused" not in script.output  # no program is blamed
    down = ray.atoll("down")
    assert down.wait() == 0
    assert ray.has() == []
    for machine in ("m1", "m2"):
        assert ray.running(machine, "atoll.") == []
    for machine in ray.bed.names:
        listing = ray.start(machine, ["sh", "-c", "ls /tmp /dev/shm"])
        listing.wait()
        assert "atoll-ray" not in listing.output


def test_a_raylet_that_is_killed_takes_its_host_along_and_the_island_is_back_when_the_node_is(ray: RayMachines) -> None:
    script = ray.script("m0", LOOP, up(ray, "1x2x2"))
    script.line(lambda line: line == "kept 140.0")
    struck = time.monotonic()
    for pid in ray.running("m2", "raylet/raylet"):
        os.kill(pid, signal.SIGKILL)
    script.line(lambda line: line.startswith("lost"), struck)
    ray.wait_until(lambda report: not ray.running("m2", "atoll."), 10)

    def lacks(report: dict[str, Any]) -> bool:
        return "1 node can have that" in str(report["islands"][0]["waits_for"])

    waits = ray.wait_until(lacks)["islands"][0]["waits_for"]
    assert "waits for 1 of 2 hosts" in waits
    assert "on 2 nodes; of its 2 nodes" in waits
    ray.start_node("m2")
    again = time.monotonic()
    script.line(lambda line: line == "kept 140.0", again, seconds=90)


def test_what_is_on_a_node_that_ray_drains_is_moved_before_it_is_lost(ray: RayMachines) -> None:
    script = ray.script("m0", ISLANDS, up(ray, "2x1x2"))
    script.line(lambda line: line.startswith("sums"))
    away, other = (each["hosts"][0]["machine"] for each in ray.status()["islands"])
    ray.drain(away, 60)

    def is_placed_anew(report: dict[str, Any]) -> bool:
        island = report["islands"][0]
        return island["state"] == "ready" and [each["machine"] for each in island["hosts"]] == [other]

    ray.wait_until(is_placed_anew, 50)
    assert ray.running(away, "operate.command host") == []  # all processes of the cluster have ended
    script.line(lambda line: line == SUMS, time.monotonic())
    assert {line for _, line in script.lines} == {SUMS}


def test_a_computation_over_islands_outlives_a_worker_and_a_node_whose_island_is_placed_on_another(
    make_machines: Callable[..., Machines],  # noqa: F811
) -> None:
    with RayMachines(make_machines(4)) as ray:
        script = ray.script("m0", OVER_ISLANDS, up(ray, "2x1x2"))
        script.line(lambda line: line == "kept 140.0")
        first, second = (each["hosts"][0]["machine"] for each in ray.status()["islands"])
        assert first != second
        (worker,) = ray.running(first, "atoll.worker.worker_main")
        struck = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        is_back(script, struck)
        struck = time.monotonic()
        for pid in ray.running(second, "raylet/raylet"):
            os.kill(pid, signal.SIGKILL)
        is_back(script, struck)
        placed = {each["hosts"][0]["machine"] for each in ray.status()["islands"]}
        assert placed == {"m1", "m2", "m3"} - {second}
        assert {line for _, line in script.lines if line.startswith("kept")} == {"kept 140.0"}


def test_a_computation_over_islands_is_moved_with_its_arrays_from_a_node_that_ray_drains(
    make_machines: Callable[..., Machines],  # noqa: F811
) -> None:
    with RayMachines(make_machines(4)) as ray:
        script = ray.script("m0", OVER_ISLANDS, up(ray, "3x1x2"))
        script.line(lambda line: line == "kept 140.0")
        away = ray.status()["islands"][0]["hosts"][0]["machine"]
        ray.drain(away, 60)
        ray.wait_until(lambda report: ray.running(away, "operate.command host") == [], 50)
        script.line(lambda line: line == "kept 140.0", time.monotonic())
        assert [each["state"] for each in ray.status()["islands"]][1:] == ["ready", "ready"]
        assert {line for _, line in script.lines} == {"kept 140.0"}


def test_a_start_that_ray_has_no_room_for_says_what_is_missing_and_goes_on_when_it_is_there(ray: RayMachines) -> None:
    given_up = ray.atoll(*UP, "1x3x1", "--wait", "5")
    assert given_up.wait() == 1
    assert "was not up within 5 s: island 0 waits for 3 of 3 hosts: ranks 0, 1, 2; Ray is asked for" in given_up.output
    assert ray.has() == []
    waiting = ray.atoll(*UP, "2x1x2", "--ray-resources", "CPU=2,rack=1", "--ray-labels", "zone=a")

    def text(report: dict[str, Any]) -> str:
        return str([each["waits_for"] for each in report["islands"]])

    none = "Ray is asked for (CPU 2, rack 1, label zone=a); of its 3 nodes, none can have that"
    ray.wait_until(lambda report: none in text(report))
    for name in ("m1", "m2"):
        ray.bed.reboot(name)
        ray.start_node(name, "--num-cpus", "2", "--resources", '{"rack": 1}', "--labels", "zone=a")
    _, address = waiting.line(is_address, seconds=120)
    assert ray.script("m0", "import jax; print(len(jax.devices()), 'devices')", address).wait() == 0


def test_a_cluster_in_the_foreground_ends_with_its_command_even_where_that_is_killed(ray: RayMachines) -> None:
    foreground = ray.atoll(*UP, "2x1x1", "--foreground")
    foreground.line(is_address, seconds=120)
    os.kill(foreground.pid, signal.SIGKILL)
    nothing_is_left(ray)


def test_where_the_actor_of_the_engine_is_killed_the_cluster_ends_and_nothing_is_left(ray: RayMachines) -> None:
    up(ray, "2x1x1")
    (actor,) = ray.running("m0", "ray::EngineActor")
    os.kill(actor, signal.SIGKILL)
    nothing_is_left(ray)
    down = ray.atoll("status")
    assert down.wait() == 1
    assert "no cluster is up" in down.output


def test_with_a_journal_a_cluster_outlives_its_controller_and_the_actor_of_its_engine(ray: RayMachines) -> None:
    script = ray.script("m0", LOOP, up(ray, "1x2x2", "--journal", "/tmp/journal"))
    script.line(lambda line: line == "kept 140.0")
    engine = ray.running("m0", "atoll.engines.engine_main")
    for text, by_ray in (
        ("atoll.controller_process.controller_main", False),
        ("ray::EngineActor", False),
        ("ray::EngineActor", True),
    ):
        (killed,) = ray.running("m0", text)
        struck = time.monotonic()
        if by_ray:
            assert ray.start("m0", [sys.executable, "-c", KILL]).wait() == 0
        else:
            os.kill(killed, signal.SIGKILL)
        while ray.running("m0", text) in ([], [killed]):
            assert time.monotonic() < struck + 40, text
            time.sleep(0.1)
        print(f"{text}: there again after {time.monotonic() - struck:.1f} s")
        script.line(lambda line: line == "kept 140.0", time.monotonic() + 1)
    assert "lost" not in script.output
    assert ray.running("m0", "atoll.engines.engine_main") == engine
    (worker,) = ray.running("m1", "atoll.worker.worker_main")
    struck = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    is_back(script, struck)  # by the same engine
    ended = ray.start("m1", ray.atoll_command("down", "--ray-address", "auto"))
    assert ended.wait() == 0  # the engine asks the actor that took over
    nothing_is_left(ray)


def test_with_a_journal_too_a_cluster_whose_engine_is_killed_ends_with_its_actor(ray: RayMachines) -> None:
    up(ray, "2x1x1", "--journal", "/tmp/journal")
    for text in ("atoll.engines.engine_main", "ray::EngineActor"):
        (pid,) = ray.running("m0", text)
        os.kill(pid, signal.SIGKILL)
    nothing_is_left(ray)


def nothing_is_left(ray: RayMachines) -> None:
    deadline = time.monotonic() + 30
    while left := ray.has():
        assert time.monotonic() < deadline, left
    no_process_is_left(ray)


def no_process_is_left(ray: RayMachines) -> None:
    """Check that no process of the cluster is left, apart from scripts and proxies.

    Ray needs some time after losing its head.
    """
    deadline = time.monotonic() + 90
    while left := [
        (machine, text, pid)
        for machine in ray.bed.names
        for text in ("atoll.engines", "atoll.controller", "atoll.worker", "operate.command", "Actor")
        for pid in ray.running(machine, text)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_any_machine_with_the_join_string_runs_scripts_on_a_cluster_shows_it_and_ends_it(ray: RayMachines) -> None:
    address = up(ray, "1x1x2")
    assert address.startswith("tls://")
    joins = {"ATOLL_JOIN": ray.join_token()}
    stranger = ray.script("m2", "import jax; jax.devices()", address)
    assert stranger.wait() != 0
    assert "needs the cluster's join token" in stranger.output
    assert ray.script("m2", "import jax; print(len(jax.devices()), 'devices')", address, **joins).wait() == 0
    shown = ray.start("m1", ray.atoll_command("status"), **joins)
    assert shown.wait() == 0
    assert "ready" in shown.output
    ended = ray.start("m1", ray.atoll_command("down"), **joins)
    assert ended.wait() == 0
    assert "has ended" in ended.output
    nothing_is_left(ray)


def test_a_cluster_outlives_rays_head_for_as_long_as_its_nodes_do_and_leaves_nothing(ray: RayMachines) -> None:
    address = ray.up("1x1x2", "--lease", str(LEASE), machine="m1")
    joins = {"ATOLL_JOIN": ray.join_token("m1")}
    script = ray.script("m0", LOOP, address, **joins)
    script.line(lambda line: line == "kept 140.0")
    struck = time.monotonic()
    for pid in ray.running("m0", "gcs/gcs_server"):
        os.kill(pid, signal.SIGKILL)
    script.line(lambda line: line == "kept 140.0", struck + 5)
    lost, _ = script.line(lambda line: line.startswith("lost"), struck)
    print(f"the script went on for {lost - struck:.1f} s")
    no_process_is_left(ray)


def test_where_the_machine_of_rays_head_is_lost_its_users_hear_of_it_and_nothing_is_left(ray: RayMachines) -> None:
    address = up(ray, "1x1x2")
    joins = {"ATOLL_JOIN": ray.join_token()}
    script = ray.script("m2", LOOP, address, **joins)
    script.line(lambda line: line == "kept 140.0")
    struck = time.monotonic()
    ray.bed.reboot("m0")
    lost, _ = script.line(lambda line: line.startswith("lost"), struck)
    assert lost - struck < LEASE + 3
    while ray.running("m1", "atoll.worker") + ray.running("m2", "atoll.worker"):
        assert time.monotonic() - struck < LEASE + 4
        time.sleep(0.1)
    no_process_is_left(ray)
    print(f"nothing was left after {time.monotonic() - struck:.1f} s")


def test_a_second_cluster_of_the_same_name_is_refused(ray: RayMachines) -> None:
    up(ray, "1x1x1")
    again = ray.start("m1", ray.atoll_command(*UP, "1x1x1"))
    assert again.wait() == 1
    assert "there is a cluster named default on this Ray cluster" in again.output
    other = ray.start("m1", ray.atoll_command(*UP, "1x1x1", "--name", "other"))
    other.line(lambda line: line.startswith("tls://10.77.0.2:"), seconds=90)


def test_a_start_that_was_killed_is_ended_by_its_name_from_any_node(ray: RayMachines) -> None:
    start = ray.atoll(*UP, "2x1x1")
    deadline = time.monotonic() + 60
    while not ray.running("m0", "atoll.controller_process.controller_main"):
        assert time.monotonic() < deadline, start.output
    os.kill(start.pid, signal.SIGKILL)
    by_name = ray.atoll_command("down", "--ray-address", "auto")
    ended = ray.start("m1", by_name)
    assert ended.wait() == 0
    assert ended.output == "cluster default on the Ray cluster at auto has ended"
    assert ray.has() == []
    no_process_is_left(ray)
    again = ray.start("m1", by_name)
    assert again.wait() == 1
    assert "no cluster named default on the Ray cluster at auto" in again.output
