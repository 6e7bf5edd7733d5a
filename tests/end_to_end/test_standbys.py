"""Tests that a standby continues if the controller's process is killed or unreachable: clients get the results of an
undisturbed run.

`make restarts` has several takeovers (ATOLL_TEST_TAKEOVERS), each by a standby of the previous controller, and one from
a controller that is only silent. The suite has one in `test_restarts`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.journal_archive import JournalArchive
from tests.end_to_end.lost_controller import Clients, check, controller, controller_of, taken_over
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster
from tests.forked_process import children

TAKEOVERS = int(os.environ.get("ATOLL_TEST_TAKEOVERS", "0"))
pytestmark = [pytest.mark.executed, pytest.mark.skipif(not TAKEOVERS, reason="make restarts")]


def test_a_standby_goes_on_where_the_controller_is_killed(
    journaled_cluster: StandingCluster, start_python: StartPython, tmp_path: Path, module_directory: Path
) -> None:
    rng = random.Random(os.environ.get("ATOLL_TEST_SEED", "1"))
    cluster = journaled_cluster
    clients = Clients(cluster, start_python, tmp_path)
    seconds, compared, lost = [], 0, 0
    present = controller(cluster)
    archive = JournalArchive(module_directory / "journal", module_directory / "archive")
    for count in range(TAKEOVERS):
        directory = module_directory / f"standby-{count}"
        following = JournalArchive(directory / "journal", module_directory / f"archive-{count}")
        engine = cluster.start_standby(directory)
        time.sleep(rng.uniform(0.1, 1.0))
        present.kill()
        seconds.append(taken_over(cluster))
        present = controller_of(engine)
        check(cluster)
        archive.close()
        compared += archive.check_snapshots()
        lost += archive.check_continued(following)
        archive = following
        print(f"takeover {count + 1}: {seconds[-1]:.2f} s", flush=True)
    trainings = clients.finish()
    archive.close()
    print(
        f"{TAKEOVERS} takeovers, {trainings} trainings; the standby answers within {max(seconds):.2f} s at most; "
        f"{compared} snapshots are as replayed, and {lost} events had not reached the standbys"
    )
    assert compared >= TAKEOVERS, "each standby begins with a snapshot of the live controller"


def test_a_controller_that_could_not_be_heard_for_a_while_ends_when_its_standby_has_taken_over(
    journaled_cluster: StandingCluster, start_python: StartPython, tmp_path: Path, module_directory: Path
) -> None:
    cluster = journaled_cluster
    clients = Clients(cluster, start_python, tmp_path)
    earlier = next(
        each
        for child in cluster._children
        for each in children(child.pid)
        if "atoll.controller_process.controller_main" in each.cmdline()
    )
    cluster.start_standby(module_directory / "standby-of-the-silent")
    earlier.send_signal(signal.SIGSTOP)
    print(f"a standby of a controller that is silent answers after {taken_over(cluster):.2f} s")
    earlier.send_signal(signal.SIGCONT)
    psutil.wait_procs([earlier], timeout=30)
    assert not earlier.is_running(), cluster.messages()
    assert "has begun elsewhere: this controller" in cluster.messages()
    check(cluster)
    clients.finish()
