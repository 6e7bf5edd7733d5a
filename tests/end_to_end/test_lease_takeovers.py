"""Tests that a standby with a lease in etcd replaces a controller that is frozen or killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.leadership.lease_address import open_lease
from atoll.leadership.lease_record import LEASE_SECONDS, RETRY_SECONDS, LeaseRecord
from tests.end_to_end.lost_controller import check, controller, taken_over
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.leadership.lease_servers import real_etcd

pytestmark = [pytest.mark.executed, pytest.mark.thorough]


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[str]:
    with real_etcd(tmp_path) as address:
        yield f"etcd://{address}/atoll"


@pytest.fixture
def cluster(lease: str, start_cluster: StartCluster, tmp_path: Path) -> StandingCluster:
    journal = str(tmp_path / "journal")
    return start_cluster(islands="1x1x2", journal=journal, lease=lease, grace_seconds=120.0)


def record(lease: str) -> LeaseRecord:
    stored = open_lease(lease).read()
    assert stored is not None
    return stored.record


def compute(count: int) -> float:
    import jax.numpy as jnp

    return float(jnp.sum(jnp.ones(8) * count))


def test_a_frozen_controller_is_replaced_and_sends_nothing_when_it_continues(
    cluster: StandingCluster, lease: str, start_python: StartPython, tmp_path: Path
) -> None:
    python = start_python(ATOLL_ADDRESS=cluster.address)
    assert python.call(compute, 1, seconds=120) == 8
    frozen = controller(cluster)
    cluster.start_standby(tmp_path / "standby")
    assert record(lease).standby == cluster.standby
    frozen.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    python.begin(compute, 2)
    taken_over(cluster)
    print(f"the standby of a frozen controller answers after {time.monotonic() - began:.1f} s")
    assert python.finish(120) == 16
    assert record(lease).transitions == 1
    frozen.send_signal(signal.SIGCONT)
    psutil.wait_procs([frozen], timeout=60)
    assert not frozen.is_running(), cluster.messages()
    assert "term 1000 has begun elsewhere: this controller, of term 1, ends" in cluster.messages()
    assert "sends what it has held back" not in cluster.messages()
    check(cluster)
    assert python.call(compute, 3, seconds=120) == 24
    python.close()


def test_a_killed_controller_is_replaced_before_its_lease_expires(
    cluster: StandingCluster, lease: str, start_python: StartPython, tmp_path: Path
) -> None:
    python = start_python(ATOLL_ADDRESS=cluster.address)
    assert python.call(compute, 1, seconds=120) == 8
    cluster.start_standby(tmp_path / "standby")
    controller(cluster).kill()
    killed = time.time()
    print(f"the standby of a killed controller answers after {taken_over(cluster):.1f} s")
    assert record(lease).transitions == 1
    assert record(lease).acquired - killed < LEASE_SECONDS - RETRY_SECONDS, "the engine has released it"
    assert python.call(compute, 2, seconds=120) == 16
    check(cluster)
    python.close()
