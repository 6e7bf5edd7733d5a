"""Test that a worker that hangs at its start is replaced after a lease.

No connection of the worker could detect this.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress

import psutil
import pytest

from tests.cluster_process import User, eventually, finish, free_port

LEASE_SECONDS = 3.0
BACK_SECONDS = 300.0  # the start of a worker on a busy machine


def workers(user: User) -> set[psutil.Process]:
    return {process for process, command in user.commands().items() if " atoll.worker.worker_main " in command}


def stop_one_that_starts(user: User, but: set[psutil.Process]) -> psutil.Process:
    """Stop the next worker as soon as its process exists. Processes that it forks first have the same command line."""
    stopped: list[psutil.Process] = []

    def stops() -> bool:
        found = workers(user)
        pids = {each.pid for each in found | but}
        for each in found - but:
            with suppress(psutil.NoSuchProcess):
                if each.ppid() not in pids:
                    each.suspend()
                    stopped.append(each)
                    return True
        return False

    assert eventually(stops, BACK_SECONDS)
    return stopped[0]


@pytest.mark.parametrize("engine", ["local", pytest.param("hosts", marks=pytest.mark.thorough)])
def test_a_worker_that_is_stopped_while_it_starts_is_replaced(user: User, engine: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    hosts: list[subprocess.Popen[str]] = []
    options = ("--islands", "1x2x1", "--lease", str(LEASE_SECONDS), "--engine", engine, "--listen", address)
    up = user.start_atoll("up", *options)
    if engine == "hosts":
        assert eventually(lambda: "waits for 2 of 2 hosts" in user.atoll("status").stdout, BACK_SECONDS)
        hosts = [user.start_atoll("host", "--address", address) for _ in range(2)]
    stopped = stop_one_that_starts(user, set())
    finish(up).check()  # the first start of the cluster
    assert not stopped.is_running()

    # On a busy machine, a worker that works can also miss its lease. Its island has no workers until it starts again.
    assert eventually(lambda: len(workers(user)) == 2 and "ready" in user.atoll("status").stdout, BACK_SECONDS, 0.2)
    there = workers(user)
    next(iter(there)).kill()
    began = time.monotonic()
    stopped = stop_one_that_starts(user, there)
    assert eventually(lambda: not stopped.is_running(), BACK_SECONDS)
    assert time.monotonic() - began > LEASE_SECONDS - 1, "it was missed before its lease was over"
    assert eventually(lambda: "ready" in user.atoll("status").stdout, BACK_SECONDS)
    user.atoll("down").check()
    for host in hosts:
        finish(host).check()
    assert user.leftovers() == []
