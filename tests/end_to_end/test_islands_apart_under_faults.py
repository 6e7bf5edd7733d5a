"""Functions over islands that need a world, and others, are compiled while the controller and workers are killed."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.lost_controller import check, go_on, nothing_left
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster

SECONDS = 300.0
ROUNDS = int(os.environ.get("ATOLL_TEST_ISLAND_FAULTS", "4"))

pytestmark = pytest.mark.thorough


def compile_over_islands(stop: str, progress: str, first: float) -> tuple[int, int, int]:
    """Compile and run new functions, and check results. Return the numbers of rounds, of losses and of wrong values."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("dcn", "ici")), P(("dcn", "ici")))
    content = np.arange(16.0).reshape(4, 4)
    kept = jax.jit(lambda x: x + 1)
    losses = wrong = count = 0
    for count in go_on(stop):
        factor = first + count / 1024
        apart = jax.jit(lambda x, factor=factor: x * factor)
        together = jax.jit(lambda x, factor=factor: x + x.max() * factor)
        try:
            x = jax.device_put(content, sharding)
            for function, expected in (
                (kept, content + 1),
                (apart, content * factor),
                (together, content + content.max() * factor),
            ):
                wrong += not np.array_equal(np.asarray(function(x)), expected)
        except jax.errors.JaxRuntimeError as error:
            if "DATA_LOSS" not in str(error):
                raise
            losses += 1
        Path(progress).write_text(str(count))
    return count, losses, wrong


def test_functions_over_islands_survive_the_controller_and_the_workers(
    journaled_cluster: StandingCluster, start_python: StartPython, tmp_path: Path
) -> None:
    cluster, rng = journaled_cluster, random.Random(os.environ.get("ATOLL_TEST_SEED", "1"))
    clients = [start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2)]
    stop, files = tmp_path / "stop", [tmp_path / f"progress-{number}" for number in range(2)]
    for client, file, first in zip(clients, files, (1.0, 1.0 + 1 / 2048), strict=True):
        client.begin(compile_over_islands, str(stop), str(file), first)
    try:
        for number in range(ROUNDS):
            before = [_read(each) for each in files]
            deadline = time.monotonic() + SECONDS
            while any(_read(file) < count + 3 for file, count in zip(files, before, strict=True)):
                assert time.monotonic() < deadline, "no progress"
                assert all(client.process.poll() is None for client in clients)
                time.sleep(0.02)
            time.sleep(rng.random() / 3)
            if number % 2:
                cluster.worker(rng.randrange(2)).kill()
                cluster.until(lambda report: any(each["state"] != "ready" for each in report["islands"]), SECONDS)
                cluster.until(lambda report: all(each["state"] == "ready" for each in report["islands"]), SECONDS)
            else:
                next(each for name, each in cluster.processes().items() if "controller_main" in name).kill()
                cluster.until(lambda report: bool(report["islands"]), SECONDS)
            check(cluster)
    finally:
        stop.touch()
    outcomes = [client.finish(SECONDS) for client in clients]
    print(outcomes, "(rounds, losses, wrong values)")
    assert [wrong for _, _, wrong in outcomes] == [0, 0]
    for client in clients:
        client.close()
    nothing_left(cluster)


def _read(file: Path) -> int:
    return int(file.read_text() or 0) if file.exists() else 0
