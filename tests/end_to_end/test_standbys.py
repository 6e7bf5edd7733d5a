"""A standby goes on where the controller's process is killed, or cannot be heard: clients get what they would have got.

`make restarts` has some takeovers (ATOLL_TEST_TAKEOVERS), each by a standby of the one before, and one from a
controller that is only silent; the suite has one in `test_restarts`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from atoll.cluster.settings import GRACE_SECONDS
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.end_to_end.test_restarts import (
    check,
    compile_on,
    controller,
    controller_of,
    move_on,
    open_session,
    taken_over,
    train_on,
)
from tests.end_to_end.two_islands import train

TAKEOVERS = int(os.environ.get("ATOLL_TEST_TAKEOVERS", "0"))
pytestmark = pytest.mark.skipif(not TAKEOVERS, reason="make restarts")
_STEPS = 40
_END_SECONDS = 300.0


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, module_directory: Path) -> StandingCluster:
    journal = str(module_directory / "journal")
    return start_cluster(islands="2x1x2", journal=journal, grace_seconds=GRACE_SECONDS)


def test_a_standby_goes_on_where_the_controller_is_killed(
    cluster: StandingCluster, start_python: StartPython, tmp_path: Path, module_directory: Path
) -> None:
    rng = random.Random(os.environ.get("ATOLL_TEST_SEED", "1"))
    stop = str(tmp_path / "stop")
    clients = {work: start_python(ATOLL_ADDRESS=cluster.address) for work in (train_on, compile_on, move_on)}
    undisturbed = clients[train_on].call(train, _STEPS, seconds=_END_SECONDS)
    for work, python in clients.items():
        assert python.call(open_session, seconds=_END_SECONDS) == 4
        python.begin(work, stop)
    seconds = []
    present = controller(cluster)
    for count in range(TAKEOVERS):
        engine = cluster.start_standby(module_directory / f"standby-{count}")
        time.sleep(rng.uniform(0.1, 1.0))
        present.kill()
        seconds.append(taken_over(cluster))
        present = controller_of(engine)
        check(cluster)
        print(f"takeover {count + 1}: {seconds[-1]:.2f} s", flush=True)
    Path(stop).touch()
    trained = clients[train_on].finish(_END_SECONDS)
    assert [losses for losses in trained if losses != undisturbed] == []
    for work in (compile_on, move_on):
        assert max(clients[work].finish(_END_SECONDS), default=0.0) == 0.0
    for python in clients.values():
        python.close()
    cluster.until(lambda report: not report["sessions"], 30)
    assert check(cluster).arrays == 0
    kinds = [each["kind"] for each in cluster.report()["events"]]
    assert kinds.count("lost") == 0, "no island restarts"
    print(f"{TAKEOVERS} takeovers, {len(trained)} trainings; the standby answers within {max(seconds):.2f} s at most")


def test_a_controller_that_could_not_be_heard_for_a_while_ends_when_its_standby_has_taken_over(
    cluster: StandingCluster, start_python: StartPython, tmp_path: Path, module_directory: Path
) -> None:
    stop = str(tmp_path / "stop")
    python = start_python(ATOLL_ADDRESS=cluster.address)
    undisturbed = python.call(train, _STEPS, seconds=_END_SECONDS)
    python.begin(train_on, stop)
    earlier = next(
        each
        for child in cluster._children
        for each in psutil.Process(child.pid).children()
        if "atoll.controller_process.main" in each.cmdline()
    )
    cluster.start_standby(module_directory / "standby-of-the-silent")
    earlier.send_signal(signal.SIGSTOP)
    print(f"a standby of a controller that is silent answers after {taken_over(cluster):.2f} s")
    earlier.send_signal(signal.SIGCONT)
    psutil.wait_procs([earlier], timeout=30)
    assert not earlier.is_running(), cluster.messages()
    assert "has begun elsewhere: this controller" in cluster.messages()
    check(cluster)
    Path(stop).touch()
    trained = python.finish(_END_SECONDS)
    assert [losses for losses in trained if losses != undisturbed] == []
    python.close()
    cluster.until(lambda report: not report["sessions"], 30)
    assert check(cluster).arrays == 0
