"""Kill a controller while clients work that must not notice.

The tests of restarts, standbys and faults share this module. Children import it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import atoll
from atoll.errors import ConnectError
from atoll.operate.operator_requests import request_check
from atoll.protocol.messages import CheckReply
from atoll.security.join_token import JoinToken
from atoll.wire.address import parse_address
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster
from tests.end_to_end.two_islands import train
from tests.forked_process import children

_STEPS = 40
# for a busy machine
_BACK_SECONDS = 120.0
_END_SECONDS = 300.0


# ---- work of clients until a file exists


def go_on(stop: str) -> Iterator[int]:
    count = 0
    while not Path(stop).exists() or count == 0:
        yield count
        count += 1


def open_session() -> int:
    return len(jax.devices())


def train_on(stop: str) -> list[list[str]]:
    return [train(_STEPS) for _ in go_on(stop)]


def compile_on(stop: str) -> list[float]:
    """Compile new functions. Return the largest error of their results."""
    found = []
    values = np.arange(16.0).reshape(4, 4)
    for count in go_on(stop):
        factor = 1.0 + count / 1024
        made = jax.jit(lambda x, factor=factor: jnp.sum(x * factor) + factor)(values)
        found.append(abs(float(made) - (values.sum() * factor + factor)))
    return found


def move_on(stop: str) -> list[float]:
    """Add ones on a slice that migrates during the work.

    Return the number of ones that are missing or were counted twice.
    """
    s = atoll.make_virtual_device_set().add_slice(devices=2)
    sharding = jax.sharding.NamedSharding(s.mesh("x"), jax.sharding.PartitionSpec("x"))
    state = jax.device_put(np.zeros(8), sharding)
    add = jax.jit(lambda x, y: x + y)
    differences = []
    for count in go_on(stop):
        state = add(state, jax.device_put(np.ones(8), sharding))
        if count % 8 == 7:
            differences.append(float(jnp.max(jnp.abs(state - (count + 1)))))
    return differences


class Clients:
    """Three clients that work until they are stopped: one trains on two islands, one compiles, one computes
    on a slice.
    """

    def __init__(self, cluster: StandingCluster, start_python: StartPython, directory: Path) -> None:
        self._cluster = cluster
        self._stop = directory / "stop"
        self._pythons = {work: start_python(ATOLL_ADDRESS=cluster.address) for work in (train_on, compile_on, move_on)}
        self._undisturbed = self._pythons[train_on].call(train, _STEPS, seconds=_END_SECONDS)
        for work, python in self._pythons.items():
            # A script cannot start while no controller accepts connections.
            assert python.call(open_session, seconds=_END_SECONDS) == 4
            python.begin(work, str(self._stop))

    def finish(self) -> int:
        """Stop the clients, and fail unless each has the results of an undisturbed run.

        Return the number of trainings.
        """
        self._stop.touch()
        trained = self._pythons[train_on].finish(_END_SECONDS)
        assert [losses for losses in trained if losses != self._undisturbed] == []
        assert max(self._pythons[compile_on].finish(_END_SECONDS)) == 0.0
        assert max(self._pythons[move_on].finish(_END_SECONDS), default=0.0) == 0.0
        for python in self._pythons.values():
            python.close()
        nothing_left(self._cluster)
        kinds = [each["kind"] for each in self._cluster.report()["events"]]
        assert kinds.count("failed") == 0, "no island restarts"
        return len(trained)


# ---- faults of the controller


def controller(cluster: StandingCluster) -> psutil.Process:
    (found,) = (each for name, each in cluster.processes().items() if name.startswith("atoll.controller_process"))
    return found


def answers(cluster: StandingCluster) -> float:
    """Return the seconds until a controller answers at the cluster's address."""
    began = time.monotonic()
    while True:
        with contextlib.suppress(ConnectError):
            cluster.report()
            return time.monotonic() - began
        assert time.monotonic() < began + _BACK_SECONDS, f"there is no controller again\n{cluster.messages()}"
        time.sleep(0.02)


def controller_of(engine: psutil.Process) -> psutil.Process:
    (found,) = (each for each in children(engine.pid) if "atoll.controller_process.controller_main" in each.cmdline())
    return found


def taken_over(cluster: StandingCluster) -> float:
    """Return the seconds until the standby answers, which is then the cluster's controller."""
    cluster.address = cluster.standby
    return answers(cluster)


def check(cluster: StandingCluster, join: JoinToken | None = None) -> CheckReply:
    """Check like `atoll check`: return differences that are present in each of three attempts."""
    join = join or cluster.join
    address = parse_address(cluster.address) if join is None else join.address
    reply = request_check(address, cluster.token, join)
    assert reply.contradictions == ()
    lasting = set(reply.differences)
    for _ in range(2 if lasting else 0):
        time.sleep(0.3)
        lasting &= set(request_check(address, cluster.token, join).differences)
    assert lasting == set()
    return reply


def nothing_left(cluster: StandingCluster, seconds: float = 30.0, join: JoinToken | None = None) -> None:
    """Fail unless the clients' sessions and their arrays are removed in time."""
    cluster.until(lambda report: not report["sessions"], seconds, join)
    assert check(cluster, join).arrays == 0
