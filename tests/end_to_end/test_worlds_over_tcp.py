"""Tests of computations across islands whose hosts have joined over TCP, as on several machines."""

from __future__ import annotations

import signal
import time
from typing import Any

import jax
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.security.join_token import join_file, read_join
from atoll.wire.sockets import free_address
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

# Hosts and the controller use 127.0.0.1 for everything else.
COLLECTIVES = "127.0.0.2"
BACK_SECONDS = 120.0
state: dict[str, Any] = {}


def add() -> list[float]:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    step = state.setdefault("step", jax.jit(lambda x: x + x.sum()))
    return [float(each) for each in np.asarray(step(jax.device_put(np.arange(4.0), sharding)))]


def add_when_back(seconds: float) -> list[float]:
    """Add again until no island is lost any more."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return add()
        except jax.errors.JaxRuntimeError as error:
            if "DATA_LOSS" not in str(error) or time.monotonic() > deadline:
                raise


def listening(worker: psutil.Process) -> set[str]:
    """Return the addresses at which a worker accepts TCP connections."""
    connections = worker.net_connections(kind="tcp")
    return {str(each.laddr[0]).removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN}


def test_hosts_join_worlds_on_the_network_of_collectives_only(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    """This also holds after the host that runs the coordination service was killed."""
    cluster: StandingCluster = start_cluster(
        islands="2x1x2",
        engine="hosts",
        listen=f"tls://{free_address('127.0.0.1')}",
        agents=2,
        agent_options=("--coordinator-address", COLLECTIVES),
    )
    token = join_file(cluster.directory)
    python = start_python(ATOLL_JOIN=str(token))
    expected = [6.0, 7.0, 8.0, 9.0]
    assert python.call(add) == expected
    join = read_join(str(token))
    for host in range(2):
        assert listening(cluster.worker(host, join)) == {"127.0.0.1", COLLECTIVES}
    cluster.worker(0, join).send_signal(signal.SIGKILL)
    assert python.call(add_when_back, BACK_SECONDS) == expected
