"""Tests of published arrays that are corrupted in a device's memory: `verify=True` names the devices with
wrong bytes.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll
from atoll.errors import StatusError
from atoll.pins import Version
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StartCluster

MAX_BYTES = 1 << 30  # of a mapping to search

# ---- functions that scripts run

kept: list[Version] = []


def content() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1 << 32, (64, 1024), dtype=np.uint32)


def _place(first: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[first : first + 2]), "x"), PartitionSpec("x"))


def publish() -> int:
    return atoll.publish("policy", {"w": jax.device_put(content(), _place(0))}, checksums=True)


def read(first: int, verify: bool) -> str:
    """Read the newest version. Return its verification error or the warning, or ""."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            kept.append(atoll.subscribe("policy", _place(first), verify=verify))
        except StatusError as error:
            return f"error: {error}"
    return "".join(f"warning: {each.message}" for each in found)


# ---- the tests


def corrupt(process: int, pattern: bytes) -> int:
    """Change a bit of each place in the memory of a process that has these bytes. Return the number of places."""
    found = 0
    with Path(f"/proc/{process}/mem").open("r+b", buffering=0) as memory:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            bounds, mode = line.split()[:2]
            start, stop = (int(each, 16) for each in bounds.split("-"))
            if not mode.startswith("rw") or stop - start > MAX_BYTES:
                continue
            try:
                memory.seek(start)
                place = memory.read(stop - start).find(pattern)
            except OSError:  # a mapping of a device
                continue
            if place >= 0:
                memory.seek(start + place)
                memory.write(bytes([pattern[0] ^ 1]))
                found += 1
    return found


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("verify", [True, False])
def test_later_subscribers_get_the_copy_of_an_earlier_one(
    start_cluster: StartCluster, start_python: StartPython, verify: bool
) -> None:
    cluster = start_cluster(islands="3x1x2")
    trainer, one, other = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(3))
    trainer.call(publish)
    assert one.call(read, 2, verify) == other.call(read, 4, verify) == ""
    (version,) = cluster.report()["versions"]
    assert version["passed_on"] >= content().nbytes
    for each in (trainer, one, other):
        each.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_wrong_bytes_in_the_memory_of_a_device_are_named(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    cluster = start_cluster(islands="3x1x2")
    trainer, reader = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2))
    trainer.call(publish)
    assert reader.call(read, 2, True) == ""
    assert corrupt(cluster.worker(1).pid, content()[40].tobytes()) > 0
    assert trainer.call(read, 0, True) == "", "the copy of the publisher is whole"
    named = "version 1 of policy differs from its checksums: array ['w'] on device"
    text = reader.call(read, 2, True)
    assert text == f"warning: {named} 3; the arrays were read again, from the devices of the version"
    assert corrupt(cluster.worker(0).pid, content()[3].tobytes()) > 0
    assert reader.call(read, 4, True).startswith("error: ")
    text = trainer.call(read, 0, True)
    assert text.startswith("error: ")
    assert text.endswith(f"{named} 0")
    for each in (trainer, reader):
        each.close()
