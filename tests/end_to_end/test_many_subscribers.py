"""Test that scripts on several islands wait for each version of some arrays, and get it at the same time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import atoll
from atoll.pins import Version
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StartCluster

ARRAYS, ITEMS = 4, 1 << 18
SECONDS = 300.0

# ---- functions that scripts run

kept: list[Version] = []  # a copy can feed others only while its script has it


def publish(version: int) -> int:
    """Publish arrays of numbers that depend on the version."""
    tree = [jnp.full(ITEMS, version * ARRAYS + each, jnp.float32) for each in range(ARRAYS)]
    return atoll.publish("policy", tree, checksums=True)


def subscribe(device: int, version: int) -> list[float]:
    """Read a version that may not exist yet, and verify it. Return the value of all elements of each of its arrays."""
    place = SingleDeviceSharding(jax.devices()[device])
    found = atoll.subscribe("policy", place, newer_than=version - 1, wait=SECONDS, verify=True)
    assert found.number == version
    kept.append(found)
    return [float(array[-1]) for array in found.tree]


# ---- the test


@pytest.mark.slow
@pytest.mark.thorough
def test_scripts_on_three_islands_get_each_version_at_once(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    cluster = start_cluster(islands="4x1x1")
    trainer, *readers = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(4))
    for version in (1, 2, 3):
        _all_at_once(trainer, readers, version)
    versions = cluster.report()["versions"]
    assert len(versions) == 2, "the name keeps two"
    for each in versions:
        assert each["sent"] + each["passed_on"] == 3 * each["bytes"]
    # If no transfer ends for some seconds, the publisher feeds a third reader.
    assert any(each["sent"] == 2 * each["bytes"] for each in versions)
    for each in (trainer, *readers):
        each.close()


def _all_at_once(trainer: RemotePython, readers: list[RemotePython], version: int) -> None:
    """Let all readers wait for a version, and publish it."""
    for island, reader in enumerate(readers, start=1):
        reader.begin(subscribe, island, version)
    assert trainer.call(publish, version) == version
    for reader in readers:
        assert reader.finish(SECONDS) == _values(version)


def _values(version: int) -> list[float]:
    return [float(version * ARRAYS + each) for each in range(ARRAYS)]
