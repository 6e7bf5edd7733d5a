"""Threads read, write, donate, delete and reshard arrays while workers are killed: right values, no hang, nothing left.

A few seconds in the suite; `make thorough` has ten minutes (ATOLL_TEST_READ_SECONDS), and connections between machines.
"""

from __future__ import annotations

import os
import time

import pytest

from atoll.security.join_token import JoinToken, read_join
from atoll.security.start_security import join_file
from tests.cluster_process import free_port
from tests.end_to_end.reads_under_faults import prepare, stress
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = float(os.environ.get("ATOLL_TEST_READ_SECONDS", "6"))
PAUSE_SECONDS = max(3.0, min(20.0, SECONDS / 10))  # between two kills
CLIENTS, THREADS = 2, 4
# Descriptors, segments, MiB that C and NumPy use, thousands of Python's blocks, and MiB that allocators and pools keep.
# These do not grow with the time.
GROWTH = (16, 16, 48, 60, 256)


def test_reads_and_writes_survive_killed_workers(start_cluster: StartCluster, start_python: StartPython) -> None:
    cluster = start_cluster(islands="2x1x2")
    survive(cluster, [start_python(ATOLL_ADDRESS=cluster.address) for _ in range(CLIENTS)])


@pytest.mark.thorough
def test_scripts_on_other_machines_survive_killed_workers(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    """The clients share no memory with the hosts, as on other machines."""
    cluster = start_cluster(islands="2x1x2", listen=f"tls://0.0.0.0:{free_port()}", advertise="127.0.0.1")
    join = read_join(str(join_file(cluster.directory)))
    survive(cluster, [start_python(ATOLL_JOIN=str(join)) for _ in range(CLIENTS)], join)


def survive(cluster: StandingCluster, clients: list[RemotePython], join: JoinToken | None = None) -> None:
    for each in clients:
        each.begin(prepare, SECONDS > 60)
    for each in clients:
        each.finish(SECONDS + 200)
    for number, each in enumerate(clients):
        each.begin(stress, THREADS, SECONDS, number * THREADS, GROWTH)
    end, kills = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)
        cluster.worker(kills % 2, join).kill()
        kills += 1
    for each in clients:
        found = each.finish(SECONDS + 200)
        print(kills, "kills:", found)
        assert not found["wrong"]
        assert found["done"] > 100
        assert found["arriving"] == 0
        for before, after, growth in zip(found["before"], found["after"], GROWTH, strict=True):
            assert after <= before + growth, "descriptors, segments or memory were left"
