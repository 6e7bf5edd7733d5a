"""Tests of more islands of null devices than the cluster has worker processes, so that islands share processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from atoll.devices.null.null_program import NullProgram
from atoll.engines.shared_process import MAX_PROCESSES
from atoll.operate.operator_requests import request_operation
from atoll.protocol import messages as m
from atoll.session.bare import BareClient, call, program, sharded
from atoll.wire.address import parse_address
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 120.0
LAST = MAX_PROCESSES  # the island that shares a process with island 0


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    return start_cluster(islands=f"{MAX_PROCESSES + 1}x1x1", platform="null")


def with_client(cluster: StandingCluster, work: Callable[[BareClient], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        async with asyncio.timeout(SECONDS):
            client = await BareClient.open(cluster.address)
            try:
                await work(client)
            finally:
                client.close()

    asyncio.run(body())


async def compute(client: BareClient) -> None:
    """Compute on all devices together."""
    devices = client.devices
    function = await client.compile(NullProgram("zeros", 0.0, (), (("uint8", (4,)),)), devices)
    node = call(function, (), (sharded(devices),), devices)
    await client.wait(await client.launch(client.register(program("zeros", (), [node], (0,))), (), 1))


def test_islands_of_one_process_fail_with_it_and_come_back(cluster: StandingCluster) -> None:
    with_client(cluster, compute)
    pids = [island["hosts"][0]["pid"] for island in cluster.report()["islands"]]
    assert len(set(pids)) == MAX_PROCESSES
    assert pids[0] == pids[LAST]
    os.kill(pids[0], signal.SIGKILL)
    report = cluster.until(
        lambda report: all(
            report["islands"][each]["restarts"] == 1 and report["islands"][each]["state"] == "ready"
            for each in (0, LAST)
        ),
        SECONDS,
    )
    assert [island["restarts"] for island in report["islands"]] == [1] + [0] * (MAX_PROCESSES - 1) + [1]
    with_client(cluster, compute)


def test_an_island_ends_and_another_of_its_process_works_on(cluster: StandingCluster) -> None:
    pid = cluster.worker(0).pid
    request_operation(parse_address(cluster.address), "", m.DrainRequest(LAST))
    report = cluster.until(lambda report: report["islands"][LAST]["state"] == "drained", SECONDS)
    assert report["islands"][0]["hosts"][0]["pid"] == pid

    async def work(client: BareClient) -> None:
        assert len(client.devices) == MAX_PROCESSES
        await compute(client)

    with_client(cluster, work)
