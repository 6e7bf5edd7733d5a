"""Unfenced collectives of three clients over pairs of three islands, while workers are killed.

If `ATOLL_TEST_RESULTS` names a file, the counts are appended to it, and `python -m benchmarks.fault_runs` makes a table
of them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atoll.cluster.settings import JOINT_ISLANDS
from atoll.engines.restart_rules import MAX_RESTARTS, RESTART_SPAN_SECONDS
from benchmarks.fault_runs import CollectivesRun
from benchmarks.harness.provenance import current_commit
from tests.end_to_end.lost_controller import check, nothing_left
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.recorded_results import record

# `make thorough` runs 30,000.
COLLECTIVES = int(os.environ.get("ATOLL_TEST_ISLAND_COLLECTIVES", "600"))
SEED = int(os.environ.get("ATOLL_TEST_SEED", "1"))
PER_KILL = min(600, COLLECTIVES // 2)
ISLANDS = 3
IN_FLIGHT = 50
PAIRS = ((0, 1), (1, 2), (0, 2))
# No client makes progress for this long only if something waits for itself.
STUCK_SECONDS = 120.0


def collectives(pair: tuple[int, int], scale: float, progress: str, stop: str) -> tuple[int, int, int]:
    """Compute sums over a pair of islands until `stop` exists. Return the numbers of sums, losses and wrong sums.

    The client writes the number of sums so far to the file `progress`.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = [jax.devices()[island] for island in pair]
    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")
    step = jax.jit(
        jax.shard_map(lambda x: x * 0 + jax.lax.psum(x.sum(), "x"), mesh=mesh, in_specs=spec, out_specs=spec)
    )
    # Successive sums differ, so that the value is wrong if the islands take part in different ones.
    values = [np.arange(16.0) * scale * factor for factor in (1.0, 2.0, 3.0)]
    expected = [np.full_like(each, each.sum()) for each in values]
    count = losses = wrong = 0
    arrays: list[Any] = []
    while not os.path.exists(stop):
        try:
            if not arrays:
                arrays = [jax.device_put(each, NamedSharding(mesh, spec)) for each in values]
            results = [step(arrays[each % len(arrays)]) for each in range(IN_FLIGHT)]
            for number, result in enumerate(results):
                wrong += not np.array_equal(np.asarray(result), expected[number % len(arrays)])
                count += 1
        except jax.errors.JaxRuntimeError as error:
            if "DATA_LOSS" not in str(error):
                raise
            arrays, losses = [], losses + 1
        Path(f"{progress}.new").write_text(str(count))
        os.replace(f"{progress}.new", progress)
    return count, losses, wrong


class Counts:
    """The progress of the clients."""

    def __init__(self, files: list[Path], clients: list[RemotePython], cluster: StandingCluster) -> None:
        self._cluster = cluster
        self._files = files
        self._clients = clients

    def read(self) -> list[int]:
        return [int(each.read_text() or 0) if each.exists() else 0 for each in self._files]

    def wait_for(self, each: int, together: int) -> None:
        """Wait until each client has done so many more collectives, and all together so many.

        Each client has to make progress: the collectives of one may be stuck while the others continue.
        """
        first = last = self.read()
        changed = [time.monotonic()] * len(first)
        while (counts := self.read()) and not (
            all(count - before >= each for before, count in zip(first, counts, strict=True))
            and sum(counts) - sum(first) >= together
        ):
            now = time.monotonic()
            changed = [since if count == old else now for since, old, count in zip(changed, last, counts, strict=True)]
            last = counts
            ended = [client.errors()[-2000:] for client in self._clients if client.process.poll() is not None]
            assert not ended, ended
            assert now - min(changed) < STUCK_SECONDS, f"a client makes no progress: {last}\n{self._why()}"
            time.sleep(0.05)

    def _why(self) -> str:
        """Return what each session waits for."""
        command = [sys.executable, "-m", "atoll.operate.command", "why", "--address", self._cluster.address]
        found = [
            subprocess.run([*command, str(each["id"])], capture_output=True, text=True, timeout=STUCK_SECONDS)
            for each in self._cluster.report()["sessions"]
        ]
        return "\n".join(each.stdout + each.stderr for each in found)


KINDS = pytest.mark.parametrize(
    "joint_islands", [JOINT_ISLANDS, pytest.param(0, marks=pytest.mark.thorough)], ids=["joint gangs", "single gangs"]
)


@pytest.mark.slow
@KINDS
def test_collectives_over_pairs_of_islands_have_one_order_and_survive_kills(
    start_cluster: StartCluster, start_python: StartPython, tmp_path: Path, joint_islands: int
) -> None:
    rng, started = random.Random(SEED), time.monotonic()
    cluster: StandingCluster = start_cluster(islands=f"{ISLANDS}x1x1", joint_islands=joint_islands)
    clients = [start_python(ATOLL_ADDRESS=cluster.address) for _ in PAIRS]
    stop, files = tmp_path / "stop", [tmp_path / f"progress-{number}" for number in range(len(PAIRS))]
    for number, (client, pair) in enumerate(zip(clients, PAIRS, strict=True)):
        client.begin(collectives, pair, 10.0**number, str(files[number]), str(stop))
    counts = Counts(files, clients, cluster)
    try:
        kills = kill_again_and_again(cluster, counts, rng)
    finally:
        stop.touch()
    outcomes = [client.finish(STUCK_SECONDS) for client in clients]
    sums, losses, wrong = (list(each) for each in zip(*outcomes, strict=True))
    seconds = round(time.monotonic() - started, 1)
    record(
        CollectivesRun(
            commit=current_commit(), seed=SEED, seconds=seconds, kills=kills, sums=sums, losses=losses, wrong=wrong
        )
    )
    assert not any(wrong)
    assert sum(sums) >= COLLECTIVES
    assert sum(losses) >= kills, "each kill fails a client"
    for client in clients:
        client.close()
    nothing_left(cluster)


@pytest.mark.slow
@KINDS
def test_clients_that_are_killed_during_collectives_cost_the_others_of_their_tenant_nothing(
    start_cluster: StartCluster, start_python: StartPython, tmp_path: Path, joint_islands: int
) -> None:
    """Otherwise, some islands might begin a collective of a killed client that the others never begin."""
    rng = random.Random(SEED)
    cluster: StandingCluster = start_cluster(islands="2x1x1", joint_islands=joint_islands)
    clients = [start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2)]
    stop, files = tmp_path / "stop", [tmp_path / f"progress-{number}" for number in range(2)]
    for number, client in enumerate(clients):
        client.begin(collectives, (0, 1), 10.0**number, str(files[number]), str(stop))
    counts = Counts(files, clients, cluster)
    counts.wait_for(1, 2)
    try:
        for number in range(COLLECTIVES // 200):
            killed, progress = start_python(ATOLL_ADDRESS=cluster.address), tmp_path / f"killed-{number}"
            killed.begin(collectives, (0, 1), 1000.0 + number, str(progress), str(stop))
            Counts([progress], [killed], cluster).wait_for(1, 1)
            time.sleep(rng.random() / 50)  # during any part of a burst of calls
            killed.process.kill()
            killed.process.wait()
            counts.wait_for(IN_FLIGHT, 0)
    finally:
        stop.touch()
    outcomes = [client.finish(STUCK_SECONDS) for client in clients]
    assert [(losses, wrong) for _, losses, wrong in outcomes] == [(0, 0)] * 2
    for client in clients:
        client.close()
    nothing_left(cluster)


class Victims:
    """Random islands, none of which fails so often that the cluster removes it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kills: list[deque[float]] = [deque(maxlen=MAX_RESTARTS - 1) for _ in range(ISLANDS)]

    def choose(self) -> int | None:
        """Return an island, or None if each has failed as often as it may for now."""
        now = time.monotonic()
        free = [
            island
            for island, times in enumerate(self._kills)
            if len(times) < MAX_RESTARTS - 1 or now - times[0] > RESTART_SPAN_SECONDS
        ]
        island = self._rng.choice(free) if free else None
        if island is not None:
            self._kills[island].append(now)
        return island


def _restarts(report: dict[str, Any]) -> int:
    return sum(each["restarts"] for each in report["islands"])


def _has_restarted(before: int, report: dict[str, Any]) -> bool:
    return _restarts(report) > before


def kill_again_and_again(cluster: StandingCluster, counts: Counts, rng: random.Random) -> int:
    """Kill random workers until there are enough collectives. Return the number of kills."""
    kills, victims = 0, Victims(rng)
    while sum(counts.read()) + PER_KILL < COLLECTIVES or not kills:
        counts.wait_for(IN_FLIGHT, rng.randint(PER_KILL // 2, PER_KILL))
        time.sleep(rng.random() / 10)  # during any part of a batch
        island = victims.choose()
        if island is None:
            continue
        before = _restarts(cluster.report())
        cluster.worker(island).send_signal(signal.SIGKILL)  # each island has one host
        kills += 1
        # A report may take so long that the island has failed and restarted since the last one.
        cluster.until(partial(_has_restarted, before), STUCK_SECONDS)
        cluster.until(lambda report: all(each["state"] == "ready" for each in report["islands"]), STUCK_SECONDS)
        check(cluster)
    counts.wait_for(IN_FLIGHT, PER_KILL)
    return kills
