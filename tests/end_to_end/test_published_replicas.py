"""Tests of replicas of published arrays, and of published arrays on drained islands, on a real cluster."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll
from atoll.operate.operator_requests import request_check, request_operation
from atoll.protocol.messages import DrainRequest
from atoll.wire.address import parse_address
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 60.0


def publish(first: int, value: float, replicas: int) -> int:
    """Publish arrays of this value with different shardings on two devices."""
    mesh = Mesh(np.array(jax.devices()[first : first + 2]), "x")
    rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    tree = {
        "rows": jax.device_put(jnp.full((64, 8), value), rows),
        "whole": jax.device_put(jnp.full(5, value, jnp.bfloat16), whole),
        "one": jax.device_put(jnp.float32(value), jax.devices()[first]),
    }
    return atoll.publish("policy", tree, replicas=replicas, checksums=True)


def read(first: int, version: int) -> set[float]:
    """Return the values of a version, read to two devices."""
    mesh = Mesh(np.array(jax.devices()[first : first + 2]), "x")
    tree = atoll.subscribe("policy", NamedSharding(mesh, PartitionSpec()), version=version, verify=True).tree
    return {float(value) for leaf in jax.tree.leaves(tree) for value in np.asarray(leaf, np.float32).ravel()}


def _islands(cluster: StandingCluster, version: int, islands: list[int]) -> None:
    """Wait until a version is on these islands."""

    def are_there(report: dict[str, Any]) -> bool:
        return [each["islands"] for each in report["versions"] if each["version"] == version] == [islands]

    cluster.until(are_there, SECONDS)


@pytest.mark.slow
@pytest.mark.thorough
def test_published_arrays_survive_a_killed_island_and_then_a_drained_one(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    cluster = start_cluster(islands="3x1x2")
    trainer = start_python(ATOLL_ADDRESS=cluster.address)
    version = trainer.call(publish, 0, 7.0, 2)
    cluster.until(lambda report: report["versions"][0]["state"] == "complete", SECONDS)
    cluster.until(lambda report: len(report["versions"][0]["islands"]) == 2, SECONDS)
    trainer.close()
    (copy,) = [each for each in cluster.report()["versions"][0]["islands"] if each != 0]
    cluster.worker(0).kill()
    cluster.until(lambda report: 0 not in report["versions"][0]["islands"], SECONDS)
    cluster.until(lambda report: len(report["versions"][0]["islands"]) == 2, SECONDS)
    reader = start_python(ATOLL_ADDRESS=cluster.address)
    assert reader.call(read, 2, version) == {7.0}
    reader.close()
    cluster.until(lambda report: report["islands"][0]["state"] == "ready", SECONDS)
    cluster.until(lambda report: not report["sessions"], SECONDS)
    for island in (copy, next(each for each in (1, 2) if each != copy)):
        reply = request_operation(parse_address(cluster.address), "", DrainRequest(island))
        assert reply == f"island {island} is empty, and its workers have ended"
    _islands(cluster, version, [0])
    reader = start_python(ATOLL_ADDRESS=cluster.address)
    assert reader.call(read, 0, version) == {7.0}
    reader.close()
    cluster.until(lambda report: not report["sessions"], SECONDS)
    check = request_check(parse_address(cluster.address), "")
    assert [*check.contradictions, *check.differences] == []
