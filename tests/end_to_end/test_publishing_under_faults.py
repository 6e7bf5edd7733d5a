"""Test of publishing while publishers, the controller and subscribers' islands are killed: no mixed versions, no long
waits, and no remains.

`make thorough` kills the trainer 200 times, and the controller and an island of subscribers 20 times each. It repeats
this with versions that are also in files, and then also kills the island with the published arrays 20 times. The
moments depend on `ATOLL_TEST_SEED`, so the test can run in several parts. If `ATOLL_TEST_RESULTS` names a file, the
result is appended to it, and `python -m benchmarks.fault_runs` makes a table of such results.
"""

from __future__ import annotations

import os
import random
import re
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll
from atoll.cluster.settings import GRACE_SECONDS
from atoll.errors import AtollError
from atoll.operate.operator_requests import request_check
from atoll.wire.address import parse_address
from benchmarks.fault_runs import PublishingRun, SubscriberResult
from benchmarks.harness.provenance import current_commit
from tests.end_to_end.journal_archive import JournalArchive
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.recorded_results import record
from tests.thoroughness import TIMES

KILLS = 10 * TIMES
SEED = int(os.environ.get("ATOLL_TEST_SEED", "43"))
EVERY = 10  # kills of the trainer per kill of the controller, and per kill of an island
SHAPES = ((), (64,), (256, 256), (1024, 512))
WAIT = 5.0  # deadline of each request of a subscriber
LATE = 60.0  # additional time for a loaded machine, and for a restart of the controller or of an island
END_SECONDS = 300.0

# ---- functions that scripts run


def _sharding(first: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[first : first + 2]), "x"), PartitionSpec())


def _made(seed: int) -> list[np.ndarray]:
    """Return arrays that differ from each other and from those of other seeds."""
    return [np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) * (seed + i) for i, shape in enumerate(SHAPES)]


def _checksums(arrays: list[Any]) -> list[int]:
    return [zlib.crc32(np.ascontiguousarray(each)) for each in arrays]


def publish_for_ever(seed: int, spill: str | None) -> None:
    place = _sharding(0)
    donate = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    while True:
        seed += 1
        tree = jax.device_put({"seed": np.uint32(seed), "w": _made(seed)}, place)
        atoll.publish("policy", tree, keep=2, checksums=True, spill=spill)
        donate(tree)


def publish_one(seed: int, spill: str | None) -> int:
    """Publish one version, and wait until it is complete."""
    tree = jax.device_put({"seed": np.uint32(seed), "w": _made(seed)}, _sharding(0))
    number = atoll.publish("policy", tree, checksums=True, spill=spill)
    atoll.subscribe("policy", _sharding(0), version=number)
    return number


def watch(first: int, stop: str) -> SubscriberResult:
    """Read new versions until the file `stop` exists.

    Compare each with its checksums, and with the arrays of its seed.
    """
    place, newest = _sharding(first), 0
    found = SubscriberResult()
    while not Path(stop).exists():
        started = time.monotonic()
        try:
            version = atoll.subscribe("policy", place, newer_than=newest, wait=WAIT, verify=True)
            arrays = [np.asarray(each) for each in version.tree["w"]]
            seed = int(version.tree["seed"])
        except (atoll.StatusError, jax.errors.JaxRuntimeError) as error:
            kind = re.sub(r"\d+", "N", str(error))[:120]
            if "differs from its checksums" in kind:
                found.mixtures.append(str(error))
            found.errors[kind] = found.errors.get(kind, 0) + 1
            time.sleep(0.05)
        else:
            if version.number <= newest or _checksums(arrays) != _checksums(_made(seed)):
                found.mixtures.append(f"version {version.number} has arrays that seed {seed} does not make")
            newest = version.number
            found.versions += 1
        found.slowest = max(found.slowest, round(time.monotonic() - started, 3))
    return found


# ---- the test


def _wait_for_controller(cluster: StandingCluster) -> None:
    """Wait until the controller answers. It may be restarting."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        with suppress(AtollError, OSError):
            cluster.report()
            return
        time.sleep(0.05)
    raise AssertionError(f"the controller does not answer within {END_SECONDS:.0f} s")


def _differences(cluster: StandingCluster) -> list[str]:
    reply = request_check(parse_address(cluster.address), "")
    return [*reply.contradictions, *reply.differences]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("spill", [None, "disk"])
def test_subscribers_see_whole_versions_while_everything_else_is_killed(
    start_cluster: StartCluster,
    start_python: StartPython,
    tmp_path: Path,
    spill: str | None,
) -> None:
    rng = random.Random(SEED)
    cluster = start_cluster(islands="3x1x2", journal=str(tmp_path / "journal"), grace_seconds=GRACE_SECONDS)
    archive = JournalArchive(tmp_path / "journal", tmp_path / "archive")
    stop = tmp_path / "stop"
    subscribers = [start_python(ATOLL_ADDRESS=cluster.address) for _ in range(3)]
    for each, first in zip(subscribers, (2, 2, 4), strict=True):
        each.begin(watch, first, str(stop))
    controllers = islands = homes = compared = 0
    for kill in range(1, KILLS + 1):
        _wait_for_controller(cluster)  # a new script tries to connect for 5 s only
        trainer = start_python(ATOLL_ADDRESS=cluster.address)
        trainer.call(publish_one, kill << 16, spill)
        trainer.begin(publish_for_ever, kill << 16, spill)
        time.sleep(rng.uniform(0.0, 0.4))
        if kill % EVERY == 0:
            next(each for name, each in cluster.processes().items() if "controller_main" in name).kill()
            controllers += 1
        if kill % EVERY == EVERY // 2:
            cluster.worker(2).kill()
            islands += 1
        if spill and kill % EVERY == EVERY // 2 + 2:
            cluster.worker(0).kill()
            homes += 1
        trainer.process.kill()
        trainer.close()
        if kill % EVERY == 0:
            compared += archive.check_snapshots()
            print(f"{kill} kills of {KILLS}; {compared} snapshots are as replayed", flush=True)
    _wait_for_controller(cluster)  # the last kill may have ended it
    cluster.start_standby(tmp_path / "standby")
    stop.touch()
    found = [each.finish(END_SECONDS) for each in subscribers]
    for each in subscribers:
        each.close()
    report = cluster.until(lambda report: not report["sessions"], END_SECONDS)
    archive.close()
    compared += archive.check_snapshots()
    assert compared, "a standby begins with a snapshot of the live controller"
    kills = [KILLS, controllers, islands]
    result = PublishingRun(
        commit=current_commit(),
        seed=SEED,
        kills=kills,
        subscribers=found,
        differences=_differences(cluster),
        spill=spill,
        homes=homes,
    )
    record(result)
    for each in found:
        assert each.mixtures == []
        assert each.versions >= KILLS // 2
        assert each.slowest <= WAIT + LATE
    assert len(report["versions"]) <= 2
    assert result.differences == []
