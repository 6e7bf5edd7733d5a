"""Tests of killed and stopped processes: users' errors name them, other users are not affected, and they are
restarted.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import psutil
import pytest

from atoll import errors
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.script_process import GRACE_SECONDS
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

TOLD_SECONDS = 2.0
LEASE_SECONDS = 3.0
BACK_SECONDS = 300.0


@pytest.fixture(scope="module")
def standing(start_cluster: StartCluster) -> StandingCluster:
    """Start a cluster with two islands of two hosts, with one device each."""
    return start_cluster(islands="2x2x1", lease_seconds=LEASE_SECONDS)


@pytest.fixture(scope="module")
def user(start_python: StartPython, standing: StandingCluster) -> RemotePython:
    python = start_python(ATOLL_ADDRESS=standing.address)
    assert python.call(begin) == [6.0] * 4
    return python


@pytest.fixture(scope="module")
def other(start_python: StartPython, standing: StandingCluster) -> RemotePython:
    """Return a client that only uses the second island."""
    python = start_python(ATOLL_ADDRESS=standing.address)
    python.call(begin)
    return python


# ---- functions that run in users' processes

state: dict[str, Any] = {}


def begin() -> list[float]:
    """Make arrays on both islands from each other, using computations on all hosts of each island."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def on(island: int) -> Any:
        mesh = Mesh(np.array([d for d in jax.devices() if d.slice_index == island]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        step = jax.jit(lambda x: x * 0 + x.sum(), out_shardings=sharding)
        return sharding, step

    state["shardings"], state["steps"] = zip(on(0), on(1), strict=True)
    found = fresh()
    for island in (0, 1):  # a compilation while an island fails waits for it, and reports nothing before that
        one_step(island, state["arrays"][island])
    return found


def fresh() -> list[float]:
    """Send data through both islands again, with the devices and functions from before."""
    import jax
    import numpy as np

    first = state["steps"][0](jax.device_put(np.arange(4.0), state["shardings"][0]))
    state["arrays"] = [first, jax.device_put(first, state["shardings"][1])]
    return [float(x) for x in np.asarray(state["arrays"][1])]


def one_step(island: int, x: Any) -> Any:
    return (state["steps"][island](x) / 4).block_until_ready()


def until_it_fails(island: int) -> float:
    """Compute on an island until that fails. Return the time of the failure. Raise any other error."""
    x = state["arrays"][island]
    try:
        while True:
            x = one_step(island, x)
    except Exception as error:
        state["error"] = str(error)
        return time.time()


def last_error() -> str:
    return str(state["error"])


def compute(island: int, seconds: float) -> int:
    """Run steps on an island, and check each."""
    import numpy as np

    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        x = np.asarray(state["steps"][island](state["arrays"][island]))
        assert x.tolist() == [24.0] * 4, x
        count += 1
    return count


def many_launches_then_wait() -> None:
    x = state["arrays"][0]
    for _ in range(100_000):
        x = state["steps"][0](x) / 4
    x.block_until_ready()


# ---- the tests


def lose(standing: StandingCluster, user: RemotePython, host: int, signal_: int) -> tuple[float, str]:
    """End a worker while the user computes on its island. Return the delay of the error, and its text."""
    user.begin(until_it_fails, 0)
    time.sleep(0.2)
    standing.worker(host).send_signal(signal_)
    ended = time.time()
    failed = user.finish()
    return failed - ended, user.call(last_error)


def is_back(standing: StandingCluster) -> None:
    standing.until(lambda report: all(each["state"] == "ready" for each in report["islands"]), BACK_SECONDS)


def test_a_killed_worker_fails_what_was_there_and_no_other_client(standing, user, other):
    other.begin(compute, 1, 1.5)
    seconds, error = lose(standing, user, 1, signal.SIGKILL)
    assert seconds < TOLD_SECONDS + GRACE_SECONDS
    assert "DATA_LOSS: host 1 of island 0 is gone" in error
    assert "killed by SIGKILL" in error
    assert "(in jit" in error, "the program is named"
    details = errors.details_in(error)[1]
    assert (details.kind, details.islands, details.hosts) == (errors.Kind.ISLAND, (0,), (1,))
    assert details.retriable
    assert details.program.startswith("jit")
    assert other.finish() > 0
    # The same devices, shardings and functions of the same script work again.
    assert user.call(fresh) == [6.0] * 4
    is_back(standing)
    islands = standing.report()["islands"]
    assert [island["restarts"] for island in islands] == [1, 0]
    assert "host 1 of island 0 is gone" in islands[0]["last_failure"]


def test_a_stopped_worker_is_named_and_replaced(standing, user):
    stopped = standing.worker(0)
    seconds, error = lose(standing, user, 0, signal.SIGSTOP)
    assert seconds < LEASE_SECONDS + TOLD_SECONDS + GRACE_SECONDS
    assert f"DEADLINE_EXCEEDED: host 0 of island 0 has not answered for {LEASE_SECONDS:.0f} s" in error
    assert user.call(fresh) == [6.0] * 4
    assert not stopped.is_running()


def test_a_client_killed_in_the_middle_of_its_launches_leaves_nothing_and_disturbs_no_other(
    standing, user, other, start_python
):
    before = {session["id"] for session in standing.report()["sessions"]}
    doomed = start_python(ATOLL_ADDRESS=standing.address)
    doomed.call(begin)
    doomed.begin(many_launches_then_wait)
    standing.until(lambda report: any(s["in_flight"] > 100 for s in report["sessions"] if s["id"] not in before), 20)
    doomed.process.kill()
    standing.until(lambda report: {session["id"] for session in report["sessions"]} == before, 10)
    assert user.call(compute, 0, 0.5) > 0
    assert other.call(compute, 1, 0.5) > 0
    standing.until(lambda report: all(island["in_flight"] == 0 for island in report["islands"]), 10)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_program_that_crashes_its_worker_is_refused_from_then_on_and_it_alone(start_cluster, start_python):
    crashing = start_cluster(islands="1x1x2")
    user = start_python(ATOLL_ADDRESS=crashing.address)
    user.call(put_one)
    before = crashing.report()["islands"][0]["started"]
    user.begin(loop_for_ever)
    loop_runs = {"started": before + 1, "in_flight": 1}
    crashing.until(lambda report: loop_runs.items() <= report["islands"][0].items(), BACK_SECONDS)
    crashing.worker(0).send_signal(signal.SIGSEGV)
    with pytest.raises(RemoteError, match=r"DATA_LOSS: host 0 of island 0 is gone .*SIGSEGV"):
        user.finish()
    user.call(put_one)
    with pytest.raises(RemoteError, match=r"ABORTED: this computation ended the worker .*SIGSEGV"):
        user.call(loop_for_ever)
    assert crashing.report()["islands"][0]["restarts"] == 1
    assert user.call(one_device) == 3.0


def one_device() -> float:
    import jax.numpy as jnp

    return float(jnp.arange(3.0).sum())


def test_without_its_controller_a_cluster_ends_and_its_clients_get_an_error(start_cluster, start_python):
    ending = start_cluster(islands="1x2x1")
    user = start_python(ATOLL_ADDRESS=ending.address)
    processes = ending.processes()
    user.call(one_device)
    controller = next(process for name, process in processes.items() if "controller" in name)
    user.begin(until_one_device_fails)
    time.sleep(0.2)
    killed = time.time()
    controller.kill()
    assert user.finish() - killed < TOLD_SECONDS + GRACE_SECONDS
    assert "UNAVAILABLE" in user.call(last_error)
    deadline = time.monotonic() + TOLD_SECONDS + GRACE_SECONDS
    while alive := [name for name, process in processes.items() if runs(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_one_device_fails() -> float:
    import jax.numpy as jnp

    try:
        while True:
            (jnp.ones(3) + 1).block_until_ready()
    except Exception as error:
        state["error"] = str(error)
        return time.time()


def double() -> float:
    import jax

    return float(jax.jit(lambda x: x * 2)(jax.device_put(21.0, jax.devices()[0])))


def made() -> float:
    """Return the result of a computation without inputs."""
    import jax

    if "make" not in state:
        state["make"] = jax.jit(lambda: jax.numpy.ones(3).sum())
    return float(state["make"]())


def put_one() -> None:
    import jax

    state["one"] = jax.block_until_ready(jax.device_put(1))


def loop_for_ever() -> None:
    """Run one launch that does not end."""
    import jax

    # Random numbers are never negative, but a compiler cannot know that.
    follow = lambda v: (v * 1103515245 + 12345) & 0x7FFFFFFF  # noqa: E731
    jax.jit(lambda x: jax.lax.while_loop(lambda v: v >= 0, follow, x))(state["one"]).block_until_ready()


def test_a_loop_without_end_takes_its_device_no_longer_than_its_client_lives_and_a_while(start_cluster, start_python):
    cluster = start_cluster(islands="1x1x1", abandoned_seconds=1.0)
    doomed = start_python(ATOLL_ADDRESS=cluster.address)
    user = start_python(ATOLL_ADDRESS=cluster.address)
    assert user.call(double) == 42.0
    assert user.call(made) == 3.0
    doomed.call(put_one)
    before = cluster.report()["islands"][0]["started"]
    doomed.begin(loop_for_ever)
    loop_runs = {"started": before + 1, "in_flight": 1}
    cluster.until(lambda report: loop_runs.items() <= report["islands"][0].items(), BACK_SECONDS)
    user.begin(made)
    cluster.until(lambda report: sum(each["in_flight"] for each in report["sessions"]) > 1, BACK_SECONDS)
    doomed.process.kill()
    report = cluster.until(lambda report: report["islands"][0]["restarts"] == 1, BACK_SECONDS)
    assert "after its session ended" in report["islands"][0]["last_failure"]
    assert user.finish(BACK_SECONDS) == 3.0, "it waited behind the loop, and its inputs still exist: it has none"
    assert user.call(double, seconds=BACK_SECONDS) == 42.0
    user.close()
