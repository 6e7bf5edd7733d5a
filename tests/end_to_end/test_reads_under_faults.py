"""Threads read, write, donate and delete arrays while workers are killed: right values, no hang, nothing left.

A few seconds in the suite; `make thorough` has ten minutes (ATOLL_TEST_READ_SECONDS).
"""

from __future__ import annotations

import os
import time

from tests.end_to_end.reads_under_faults import prepare, stress
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StartCluster

SECONDS = float(os.environ.get("ATOLL_TEST_READ_SECONDS", "6"))
PAUSE_SECONDS = max(3.0, min(20.0, SECONDS / 10))  # between two kills
CLIENTS, THREADS = 2, 4
# Descriptors, segments, MiB that C and NumPy use, thousands of Python's blocks, and MiB that allocators and pools keep.
# These do not grow with the time.
GROWTH = (16, 16, 48, 60, 256)


def test_reads_and_writes_survive_killed_workers(start_cluster: StartCluster, start_python: StartPython) -> None:
    cluster = start_cluster(islands="2x1x1")
    clients = [start_python(ATOLL_ADDRESS=cluster.address) for _ in range(CLIENTS)]
    for each in clients:
        each.begin(prepare)
    for each in clients:
        each.finish(SECONDS + 200)
    for number, each in enumerate(clients):
        each.begin(stress, THREADS, SECONDS, number * THREADS, GROWTH)
    end, kills = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)
        cluster.worker(kills % 2).kill()
        kills += 1
    for each in clients:
        found = each.finish(SECONDS + 200)
        print(kills, "kills:", found)
        assert not found["wrong"]
        assert found["done"] > 100
        assert found["arriving"] == 0
        for before, after, growth in zip(found["before"], found["after"], GROWTH, strict=True):
            assert after <= before + growth, "descriptors, segments or memory were left"
