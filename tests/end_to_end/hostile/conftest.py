"""Fixtures of the tests with hostile messages.

They start a cluster with a proxy, an honest client of the same cluster, and a session for the hostile requests. Around
each test, every process must stay alive and the honest client must be served.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.hostile.honest_work import honest_work
from tests.end_to_end.hostile.hostile_requests import preparation
from tests.end_to_end.raw_client import RawClient
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster


@pytest.fixture(scope="module")
def address(cluster: StandingCluster, module_directory: Path) -> Iterator[str]:
    """Return the address of the module's proxy, which serves any client, also after all tests."""
    shared = module_directory / "shared"
    shared.mkdir()
    cluster.start_proxy(module_directory / "proxy.sock", shared)
    address = f"unix:{module_directory}/proxy.sock"
    yield address
    with contextlib.closing(RawClient(address)) as client:
        assert len(client.open().all_devices) == 4


@pytest.fixture(scope="module")
def neighbour(start_python: StartPython, cluster: StandingCluster) -> RemotePython:
    """Return an honest client of the same cluster, which works before the first test."""
    python = start_python(ATOLL_ADDRESS=cluster.address)
    assert python.call(honest_work) == [0, 2, 4, 6]
    return python


@pytest.fixture(autouse=True)
def _all_others_are_served(cluster: StandingCluster, address: str, neighbour: RemotePython) -> Iterator[None]:
    before = [*cluster.processes().values(), *cluster.proxies()]
    yield
    assert all(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in before)
    assert neighbour.call(honest_work) == [0, 2, 4, 6]


@pytest.fixture
def client(address: str) -> Iterator[RawClient]:
    """Return a session with arrays 1 and 2 on devices 0 and 1, and array 3 on both."""
    with contextlib.closing(RawClient(address)) as raw:
        raw.open()
        for request in preparation():
            assert raw.store(request.make_array_from_host_buffer.host_buffer, bytes(16)) == (0, "")
            assert raw.status(lambda into, request=request: into.MergeFrom(request)) == (0, "")
        yield raw
