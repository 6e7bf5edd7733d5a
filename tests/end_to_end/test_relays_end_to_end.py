"""Tests of real hosts in groups of two: results are correct and in order, and the failure of any host is one of its
island.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.script_process import GRACE_SECONDS
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.end_to_end.test_failures_end_to_end import (
    BACK_SECONDS,
    LEASE_SECONDS,
    TOLD_SECONDS,
    begin,
    compute,
    fresh,
    lose,
)
from tests.end_to_end.test_order_end_to_end import collectives

pytestmark = [
    pytest.mark.executed,
    pytest.mark.skipif(
        not os.environ.get("ATOLL_TEST_MACHINES"),
        reason="the short form is tests/controller/test_world.py, with relays",
    ),
]
SECONDS = 5.0


@pytest.fixture(scope="module")
def standing(start_cluster: StartCluster) -> StandingCluster:
    return start_cluster(islands="2x2x1", lease_seconds=LEASE_SECONDS, relay_group=2)


@pytest.fixture(scope="module")
def user(start_python: StartPython, standing: StandingCluster) -> RemotePython:
    python = start_python(ATOLL_ADDRESS=standing.address)
    assert python.call(begin) == [6.0] * 4
    return python


def test_collectives_of_several_clients_are_right(start_cluster: StartCluster, start_python: StartPython) -> None:
    cluster = start_cluster(islands="1x4x1", relay_group=2)
    clients = [start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2)]
    for client, (kind, scale) in zip(clients, (("reduce", 1.0), ("gather", 10.0)), strict=True):
        client.begin(collectives, kind, scale, SECONDS)
    assert min(client.finish(SECONDS + 90) for client in clients) >= 100
    cluster.stop()


@pytest.mark.parametrize(("host", "stop"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_lost_host_is_named_and_its_island_comes_back(
    standing: StandingCluster, user: RemotePython, host: int, stop: signal.Signals
) -> None:
    """Host 0 is the relay."""
    seconds, error = lose(standing, user, host, stop)
    assert seconds < LEASE_SECONDS + TOLD_SECONDS + GRACE_SECONDS
    assert f"host {host} of island 0" in error
    assert user.call(fresh) == [6.0] * 4
    assert user.call(compute, 0, 1.0) > 0
    standing.until(lambda report: all(each["state"] == "ready" for each in report["islands"]), BACK_SECONDS)
