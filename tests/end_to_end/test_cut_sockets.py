"""Test that connections to the controller survive the loss of their sockets, so that sessions do not notice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from atoll.security.join_token import join_file
from atoll.wire.sockets import free_address
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.end_to_end.two_islands import train
from tests.thoroughness import TIMES

CUT_SOCKETS = Path(__file__).with_name("cut_sockets")
CUTS = 20 if TIMES > 1 else 8  # of each connection, at least
CONNECTIONS = ["the engine", "the proxy of remote_python.py", "the worker of host 0", "the worker of host 1"]


def train_while_sockets_are_cut(path: str, connections: int, cuts: int, steps: int) -> list[list[str]]:
    """Train repeatedly until each of `connections` connections has lost its socket `cuts` times.

    Return the losses of each training.
    """
    from collections import Counter
    from pathlib import Path

    Path(path).touch()
    runs = []
    while True:
        runs.append(train(steps))
        counts = Counter(Path(path).read_text().splitlines())
        if len(counts) >= connections and min(counts.values()) >= cuts:
            Path(path).rename(f"{path}.done")
            return runs


def start(start_cluster: StartCluster, directory: Path, **settings: Any) -> StandingCluster:
    path = os.pathsep.join(filter(None, (str(CUT_SOCKETS), os.environ.get("PYTHONPATH"))))
    cuts = {"PYTHONPATH": path, "ATOLL_CUTS": str(directory / "cuts")}
    return start_cluster(cuts, islands="2x1x1", grace_seconds=30.0, **settings)


@pytest.mark.parametrize("kind", ["unix", "tls"] if TIMES > 1 else ["unix"])
def test_sockets_are_cut_and_losses_are_bit_for_bit_those_of_an_undisturbed_run(
    start_cluster: StartCluster, start_python: StartPython, tmp_path: Path, kind: str
) -> None:
    cluster = start(start_cluster, tmp_path, listen="" if kind == "unix" else f"tls://{free_address('127.0.0.1')}")
    where = {"ATOLL_ADDRESS": cluster.address} if kind == "unix" else {"ATOLL_JOIN": str(join_file(cluster.directory))}
    python = start_python(**where)
    undisturbed = python.call(train, 60)
    runs = python.call(train_while_sockets_are_cut, str(tmp_path / "cuts"), len(CONNECTIONS), CUTS, 60)
    assert all(run == undisturbed for run in runs)
    assert sorted(set((tmp_path / "cuts.done").read_text().splitlines())) == CONNECTIONS
