"""Test of a training under faults: parts of its cluster and its proxy are killed repeatedly.

Its losses are bitwise those of an undisturbed training. `make restarts` runs 500 steps with a fault every 10 s
(ATOLL_TEST_FAULT_STEPS, ATOLL_TEST_FAULT_SECONDS), and prints each interruption. The suite runs a short form.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from atoll.cluster.settings import GRACE_SECONDS
from atoll.security.join_token import join_file
from tests.cluster_process import free_port
from tests.end_to_end.injected_faults import (
    AGENT,
    CONTROLLER,
    PROXY,
    STANDBY,
    WORKER,
    InjectedFaults,
    interruptions,
    table,
)
from tests.end_to_end.journal_archive import JournalArchive
from tests.end_to_end.lost_controller import nothing_left
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.end_to_end.training_under_faults import train_through

STEPS = int(os.environ.get("ATOLL_TEST_FAULT_STEPS", "0"))
SECONDS = float(os.environ.get("ATOLL_TEST_FAULT_SECONDS", "4"))
pytestmark = [pytest.mark.executed, pytest.mark.skipif(not STEPS, reason="make restarts")]
_PAUSE = 0.25  # between steps, as for a model that is larger than this one
_END_SECONDS = 600.0


def train_under(faults: InjectedFaults, kinds: Sequence[str], python: RemotePython) -> None:
    """Train under faults, and fail unless the losses are those of an undisturbed training. Print each interruption."""
    undisturbed, _ = python.call(train_through, STEPS, 0.0, seconds=_END_SECONDS)
    assert faults.hit_its_cluster()
    began = time.monotonic()
    python.begin(train_through, STEPS, _PAUSE)
    injected: list[tuple[str, float]] = []
    for count, kind in enumerate(itertools.cycle(kinds), 1):
        due = began + count * SECONDS
        if due > began + STEPS * _PAUSE:
            break
        time.sleep(max(0.0, due - time.monotonic()))
        injected.append((kind, faults.inject(kind)))
    losses, known = python.finish(_END_SECONDS)
    assert losses == undisturbed
    found = list(interruptions(injected, known, _PAUSE))
    for each in found:
        print(f"{each.at - began:6.1f} s  {each.kind:26} {each.seconds:5.2f} s")
    seconds = time.monotonic() - began
    print(f"{STEPS} steps in {seconds:.0f} s, {len(injected)} faults: the losses of an undisturbed run")
    print(table(found), flush=True)
    python.close()


def test_a_training_under_faults_has_the_losses_of_an_undisturbed_one(
    start_cluster: StartCluster, start_python: StartPython, module_directory: Path
) -> None:
    journal = str(module_directory / "journal")
    cluster: StandingCluster = start_cluster(islands="2x1x1", journal=journal, grace_seconds=GRACE_SECONDS)
    python = start_python(ATOLL_ADDRESS=cluster.address)
    faults = InjectedFaults(cluster, python, module_directory)
    archive = JournalArchive(module_directory / "journal", module_directory / "archive")  # until the first standby
    train_under(faults, (CONTROLLER, WORKER, STANDBY, WORKER), python)
    nothing_left(cluster)
    archive.close()
    assert archive.check_snapshots(), "a standby begins with a snapshot of the live controller"


def test_so_has_one_whose_host_agents_and_proxy_are_killed_too(
    start_cluster: StartCluster, start_python: StartPython, module_directory: Path
) -> None:
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    cluster: StandingCluster = start_cluster(
        islands="2x1x1",
        engine="hosts",
        agents=2,
        listen=f"tls://{first}",
        spare=f"tls://{second}",
        advertise=f"{first},{second}",
        journal=str(module_directory / "journal-of-hosts"),
        grace_seconds=GRACE_SECONDS,
    )
    python = start_python(ATOLL_JOIN=str(join_file(cluster.directory)))
    directory = module_directory / "standbys-of-hosts"
    directory.mkdir()
    faults = InjectedFaults(cluster, python, directory)
    train_under(faults, (PROXY, AGENT, CONTROLLER, WORKER, STANDBY), python)
    # A killed process sends no last message. Over TCP, its connection could also have been interrupted, and come back.
    nothing_left(cluster, 2 * GRACE_SECONDS)
