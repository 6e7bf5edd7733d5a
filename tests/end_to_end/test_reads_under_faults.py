"""Test of threads that read, write, donate, delete and reshard arrays while workers are killed: values are right,
nothing hangs, and nothing is left.

The suite runs it for a few seconds. `make thorough` runs it for ten minutes (ATOLL_TEST_READ_SECONDS), also with
connections between machines. If `ATOLL_TEST_RESULTS` names a file, the counts are appended to it, and
`python -m benchmarks.fault_runs` makes a table of them.
"""

from __future__ import annotations

import os
import time

import psutil
import pytest

from atoll.security.join_token import JoinToken, join_file, read_join
from benchmarks.fault_runs import ReadsRun
from benchmarks.harness.provenance import current_commit
from tests.cluster_process import free_port
from tests.end_to_end.lost_controller import check, controller, nothing_left
from tests.end_to_end.reads_under_faults import LEAST, prepare, stress
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.forked_process import children
from tests.recorded_results import record

SECONDS = float(os.environ.get("ATOLL_TEST_READ_SECONDS", "4"))
PAUSE_SECONDS = max(2.0, min(20.0, SECONDS / 10))  # between two kills
CLIENTS, THREADS = 2, 4
READY_SECONDS = 120.0
# Maximum growth of descriptors, segments, MiB of C and NumPy, thousands of Python's blocks, and MiB in allocators and
# pools. It does not depend on the time.
GROWTH = (16, 16, 48, 60, 256)
# Maximum growth of descriptors and MiB of the controller and of each proxy. A controller keeps up to 32 MiB of its last
# events.
PROCESS_GROWTH = (16, 192)


@pytest.mark.slow
def test_reads_and_writes_survive_killed_workers(start_cluster: StartCluster, start_python: StartPython) -> None:
    cluster = start_cluster(islands="2x1x2")
    survive(cluster, [start_python(ATOLL_ADDRESS=cluster.address) for _ in range(CLIENTS)])


@pytest.mark.thorough
def test_scripts_on_other_machines_survive_killed_workers(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    """The clients share no memory with the hosts, as on different machines."""
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
    lasting = [controller(cluster), *(proxy for each in clients for proxy in proxies(each))]
    assert len(lasting) == 1 + CLIENTS
    end, kills, first = time.monotonic() + SECONDS, 0, None
    while time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)
        cluster.worker(kills % 2, join).kill()
        kills += 1
        first = first or [resources(each) for each in lasting]
    outcomes = [each.finish(SECONDS + 200) for each in clients]
    record(
        ReadsRun(
            commit=current_commit(),
            is_remote=join is not None,
            seconds=SECONDS,
            kills=kills,
            done=[each["done"] for each in outcomes],
            lost=[each["lost"] for each in outcomes],
            wrong=[text for each in outcomes for text in each["wrong"]],
            pending=[each["arriving"] for each in outcomes],
        )
    )
    for found in outcomes:
        print(found)
        assert not found["wrong"]
        assert found["done"] > LEAST
        assert found["arriving"] == 0
        for before, after, growth in zip(found["before"], found["after"], GROWTH, strict=True):
            assert after <= before + growth, "descriptors, segments or memory were left"
    assert first is not None
    for process, before in zip(lasting, first, strict=True):
        after = resources(process)
        print(process.cmdline()[3:4], before, after)
        assert all(now <= then + growth for now, then, growth in zip(after, before, PROCESS_GROWTH, strict=True))
    cluster.until(lambda report: all(each["state"] == "ready" for each in report["islands"]), READY_SECONDS, join)
    check(cluster, join)
    for each in clients:
        each.close()
    nothing_left(cluster, join=join)


def proxies(client: RemotePython) -> list[psutil.Process]:
    return [each for each in children(client.pid) if "atoll.ifrt.proxy_main" in each.cmdline()]


def resources(process: psutil.Process) -> tuple[int, int]:
    """Return the descriptors and the resident MiB of a process."""
    return process.num_fds(), process.memory_info().rss >> 20
