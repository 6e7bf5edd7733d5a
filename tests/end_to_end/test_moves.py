"""Tests of slices that migrate while their program runs, which does not notice."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import atoll
from atoll.errors import StatusError
from atoll.operate.operator_requests import request_operation
from atoll.protocol.messages import AddIslandRequest, DrainRequest, RemapRequest
from atoll.wire.address import parse_address
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster


@pytest.fixture(scope="module", params=[pytest.param("2x1x4", marks=pytest.mark.thorough), "2x2x2"])
def islands(request: pytest.FixtureRequest, start_cluster: StartCluster) -> StandingCluster:
    """Start two islands of four devices, of one host and of two."""
    return start_cluster(islands=request.param, mesh="2x2")


@pytest.fixture
def python(islands: StandingCluster, start_python: StartPython) -> Any:
    islands.until(lambda report: not report["sessions"], 10)
    child = start_python(ATOLL_ADDRESS=islands.address)
    yield child
    child.close()


def remap(cluster: StandingCluster, island: int, devices: tuple[int, ...] = (), number: int = 1) -> str:
    """Move a slice of the only session."""
    (session,) = cluster.report()["sessions"]
    return ask(cluster, RemapRequest(session["id"], number, island, devices))


def ask(cluster: StandingCluster, question: RemapRequest | AddIslandRequest | DrainRequest) -> str:
    return request_operation(parse_address(cluster.address), cluster.token, question)


STATE: dict[str, Any] = {}


def digest(tree: Any) -> str:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    text = b"".join(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes() for leaf in leaves)
    return hashlib.sha256(text).hexdigest()


@functools.cache
def functions() -> dict[str, Any]:
    return {
        "matmul": jax.jit(lambda a: jnp.tanh(a @ a.T)),
        "sum": jax.jit(lambda a: a.sum(axis=0)),
        "donated": jax.jit(lambda a: a * 1.25, donate_argnums=0),
    }


def make_many_kinds() -> tuple[str, list[int]]:
    """Make arrays of many kinds on a slice of all four devices of an island."""
    s = STATE["slice"] = atoll.make_virtual_device_set().add_slice(shape=(2, 2))
    mesh = s.mesh(("x", "y"))

    def put(value: Any, *spec: Any) -> Any:
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    rng = np.random.default_rng(0)
    base = put(rng.standard_normal((64, 32)), "x", "y")
    arrays = STATE["arrays"] = {
        "tiled": base,
        "replicated": put(rng.standard_normal(1000), None),
        "partly": put(rng.integers(0, 99, (4, 6)), "y"),
        "bfloat16": put(jnp.arange(64, dtype="bfloat16"), ("x", "y")),
        "complex": put(np.array([1 + 2j, np.nan, -0.0, 1e300]), "x"),
        "bool": put(np.array([True, False] * 2), "y"),
        "empty": put(np.zeros((0, 4)), None),
        "large": put(rng.standard_normal((512, 1024)), ("x", "y")),
        "one": jax.device_put(np.arange(10), s.devices[3]),
        "scalar": jax.device_put(np.float32(1) / 3, s.devices[2]),
        "shard": base.addressable_shards[1].data,
        "computed": functions()["matmul"](base),
        "key": jax.random.key_data(jax.device_put(jax.random.key(7), s.devices[1])),
        "elsewhere": jax.device_put(np.arange(5.0), jax.devices()[-1]),
    }
    return digest(arrays), [device.id for device in s.devices]


def compute() -> str:
    arrays = STATE["arrays"]
    run = functions()
    kept = run["sum"](arrays["large"])
    given_up = run["donated"](run["matmul"](arrays["tiled"]))
    return digest([run["matmul"](arrays["tiled"]), kept, given_up, arrays["one"] + 1, arrays["tiled"].T])


def look() -> tuple[str, list[int]]:
    return digest(STATE["arrays"]), [device.id for device in STATE["slice"].devices]


def where(cluster: StandingCluster) -> list[int]:
    (session,) = cluster.report()["sessions"]
    physical: list[int] = session["slices"][0]["physical"]
    return physical


def test_a_moved_slice_has_the_same_arrays_and_computes_the_same(
    islands: StandingCluster, python: RemotePython
) -> None:
    made = python.call(make_many_kinds)
    computed = python.call(compute)
    assert where(islands) == [0, 1, 2, 3]
    assert remap(islands, 1).endswith("is on devices 4, 5, 6, 7 now")
    assert where(islands) == [4, 5, 6, 7]
    assert python.call(look) == made
    assert python.call(compute) == computed
    # No arrays are left there, except those of the program on other devices.
    first = islands.report()["islands"][0]
    assert [device["used_bytes"] for host in first["hosts"] for device in host["devices"]] == [0, 0, 0, 0]
    remap(islands, 0, (0, 2, 1, 3))  # the opposite move
    assert python.call(compute) == computed
    assert python.call(look) == made
    with pytest.raises(StatusError, match="do not form a 2x2 mesh"):
        remap(islands, 1, (4, 7, 5, 6))


def goes_on(done: int, steps: int, directory: Path | None) -> bool:
    """Return whether a program must run more steps: up to a number, or until the file "end" exists in the directory."""
    if directory is None:
        return done < steps
    if done == 1:
        (directory / "begun").touch()
    return not (directory / "end").exists()


def until_begun(directory: Path) -> None:
    deadline = time.monotonic() + 30
    while not (directory / "begun").exists():
        assert time.monotonic() < deadline, "the program does not begin"
        time.sleep(0.01)


def train(steps: int, directory: Path | None = None) -> tuple[str, int]:
    """Launch as fast as possible, for this many steps or until the file "end" exists in the directory."""
    s = STATE.get("train") or atoll.make_virtual_device_set().add_slice(devices=2)
    STATE["train"] = s
    mesh = s.mesh("x")
    sharding = NamedSharding(mesh, PartitionSpec("x"))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        weights, total = state
        gradient = jnp.outer(batch, batch) @ weights
        return weights - 1e-3 * gradient, total + jnp.sum(gradient**2)

    state = (jax.device_put(np.eye(16), NamedSharding(mesh, PartitionSpec())), jnp.zeros(()))
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    done = 0
    while goes_on(done, steps, directory):
        batch = jax.device_put(np.sin(np.arange(16.0) + done), sharding)
        state = step(state, batch)
        done += 1
        if done % 50 == 0:
            float(state[1])
    return digest(state), done


def test_a_program_that_runs_is_moved_to_and_fro(
    islands: StandingCluster, python: RemotePython, tmp_path: Path
) -> None:
    python.call(train, 5)
    python.begin(train, 0, tmp_path)
    until_begun(tmp_path)
    for target in (1, 0, 1, 0):
        remap(islands, target)
    (tmp_path / "end").touch()
    result, steps = python.finish()
    assert python.call(train, steps) == (result, steps)


def hold_two() -> list[int]:
    s = STATE["two"] = atoll.make_virtual_device_set().add_slice(devices=2)
    STATE["arrays"] = [jax.device_put(np.arange(8.0), NamedSharding(s.mesh("x"), PartitionSpec("x")))]
    return [device.id for device in s.devices]


def test_a_move_to_an_island_that_dies_meanwhile_ends_and_the_program_goes_on(
    islands: StandingCluster, python: RemotePython
) -> None:
    python.call(hold_two)
    before = python.call(arrays_digest)
    target = 1 - where(islands)[0] // 4
    worker = islands.worker(target * len(islands.report()["islands"][0]["hosts"]))
    worker.suspend()  # it receives nothing, so that the move hangs there
    timer = threading.Timer(0.5, worker.kill)
    timer.start()
    try:
        with pytest.raises(StatusError, match="stays where it is"):
            remap(islands, target)
    finally:
        timer.join()
    assert python.call(arrays_digest) == before
    islands.until(lambda report: all(island["state"] == "ready" for island in report["islands"]), 60)
    remap(islands, target)
    assert python.call(arrays_digest) == before


def arrays_digest() -> str:
    return digest([STATE["arrays"], [jax.jit(lambda v: v * 2)(each) for each in STATE["arrays"]]])


# ---- islands that are removed and added


def sum_of_all() -> tuple[int, float]:
    """Compute on all devices."""
    devices = jax.devices()
    arrays = [jax.device_put(float(i), device) for i, device in enumerate(devices)]
    return len(devices), sum(float(jax.jit(lambda v: v + 1)(array)) for array in arrays)


def sum_over_islands() -> tuple[int, float]:
    """Compute a sum across all devices. Return the number of their islands, and the sum."""
    devices = jax.devices()
    sharding = NamedSharding(jax.sharding.Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    numbers = jax.device_put(np.arange(len(devices), dtype=np.float32), sharding)
    return len({device.slice_index for device in devices}), float(jax.jit(jnp.sum)(numbers))


def states(cluster: StandingCluster) -> list[str]:
    return [island["state"] for island in cluster.report()["islands"]]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["1x2", pytest.param("2x1", marks=pytest.mark.thorough)])
def test_islands_come_and_go_under_running_programs(
    start_cluster: StartCluster, start_python: StartPython, hosts: str, tmp_path: Path
) -> None:
    cluster = start_cluster(islands=f"1x{hosts}")
    first = start_python(ATOLL_ADDRESS=cluster.address)
    first.call(hold_two)
    before = first.call(arrays_digest)
    with pytest.raises(StatusError, match="the only one that is ready"):
        ask(cluster, DrainRequest(0))
    assert ask(cluster, AddIslandRequest()) == "island 1 is up, with devices 2, 3"
    assert states(cluster) == ["ready", "ready"]
    second = start_python(ATOLL_ADDRESS=cluster.address)
    assert second.call(sum_of_all) == (4, 10.0)
    first.begin(train_on_slice, 0, tmp_path)
    until_begun(tmp_path)
    assert ask(cluster, DrainRequest(0)) == "island 0 is empty, and its workers have ended"
    (tmp_path / "end").touch()
    result, steps = first.finish()
    assert first.call(train_on_slice, steps) == (result, steps)
    assert states(cluster) == ["drained", "ready"]
    assert len([name for name in cluster.processes() if "worker" in name]) == int(hosts[0])
    # The program's devices and slice are the same as before.
    assert first.call(arrays_digest) == before
    sessions = cluster.report()["sessions"]
    assert sessions[0]["slices"][0]["physical"] == [2, 3]
    assert second.call(sum_of_all) == (4, 10.0)
    # A new session has the devices of the remaining island.
    third = start_python(ATOLL_ADDRESS=cluster.address)
    assert third.call(sum_of_all) == (2, 3.0)
    # A new island gets the next number, and its worker restarts when it is killed, as for all islands.
    assert ask(cluster, AddIslandRequest()) == "island 2 is up, with devices 4, 5"
    fourth = start_python(ATOLL_ADDRESS=cluster.address)
    assert fourth.call(sum_over_islands) == (2, 6.0)
    cluster.worker(2 * int(hosts[0])).kill()
    cluster.until(lambda report: report["islands"][2]["restarts"] == 1, 30)
    cluster.until(lambda report: report["islands"][2]["state"] == "ready", 60)
    assert fourth.call(sum_over_islands) == (2, 6.0)
    session = next(each for each in cluster.report()["sessions"] if each["slices"])
    ask(cluster, RemapRequest(session["id"], 1, 2))
    assert first.call(arrays_digest) == before
    with pytest.raises(StatusError, match="island 0 was drained already"):
        ask(cluster, DrainRequest(0))
    # A function over two islands moves with the island that is drained.
    assert ask(cluster, AddIslandRequest()) == "island 3 is up, with devices 6, 7"
    assert ask(cluster, DrainRequest(1)) == "island 1 is empty, and its workers have ended"
    assert fourth.call(sum_over_islands) == (2, 6.0)
    for child in (first, second, third, fourth):
        child.close()


def train_on_slice(steps: int, directory: Path | None = None) -> tuple[str, int]:
    s = STATE["two"]
    sharding = NamedSharding(s.mesh("x"), PartitionSpec("x"))
    state = jax.device_put(np.linspace(0, 1, 64), sharding)
    step = STATE.setdefault("step", jax.jit(lambda v, b: jnp.sin(v + b) + v.mean()))
    done = 0
    while goes_on(done, steps, directory):
        state = step(state, jax.device_put(np.cos(np.arange(64.0) + done), sharding))
        done += 1
    return digest(state), done


def spread() -> None:
    """Make an array on the devices of both islands, which cannot be on one island."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    STATE["spread"] = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))


def test_what_is_in_the_way_of_a_drain_is_named(start_cluster: StartCluster, start_python: StartPython) -> None:
    cluster = start_cluster(islands="2x1x2")
    python = start_python(ATOLL_ADDRESS=cluster.address)
    python.call(spread)
    with pytest.raises(StatusError, match=r"island 1 is in use: session 1 .*would share a physical one"):
        ask(cluster, DrainRequest(1))
    assert states(cluster) == ["ready", "ready"]
    assert python.call(sum_of_all) == (4, 10.0)
    python.close()
    cluster.until(lambda report: not report["sessions"], 10)
    assert "is empty" in ask(cluster, DrainRequest(1))


# ---- traced programs


def traced() -> list[list[float]]:
    """Run the traced program of the paper's figure 2. Its tracer runs once, and the program any number of times."""
    if "traced" not in STATE:
        devices = atoll.make_virtual_device_set()
        a = jax.pmap(lambda x: x * 2.0, devices=devices.add_slice(devices=2).tpus)
        b = jax.pmap(lambda x: x + 1.0, devices=devices.add_slice(devices=2).tpus)
        c = jax.pmap(lambda x: x / 2.0, devices=devices.add_slice(devices=2).tpus)

        @atoll.program
        def f(v: Any) -> Any:
            x = a(v)
            return b(x), a(c(x))

        STATE["traced"] = f
    return [np.asarray(each).tolist() for each in STATE["traced"](np.array([1.0, 2.0]))]


def test_a_traced_program_goes_on_where_its_slices_are_moved(islands: StandingCluster, python: RemotePython) -> None:
    expected = [[3.0, 5.0], [2.0, 4.0]]
    assert python.call(traced) == expected
    (session,) = islands.report()["sessions"]
    places = {each["id"]: each["physical"] for each in session["slices"]}
    for number, physical in places.items():
        remap(islands, 1 - physical[0] // 4, number=number)
        assert python.call(traced) == expected
    moved = {each["id"]: each["physical"] for each in islands.report()["sessions"][0]["slices"]}
    assert all(moved[number][0] // 4 != physical[0] // 4 for number, physical in places.items())
