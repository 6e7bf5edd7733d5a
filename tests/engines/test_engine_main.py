"""Tests of the engine process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from atoll.cluster.processes.process_runtime import command
from atoll.cluster.settings import ClusterSettings
from atoll.engines.engine_options import EngineOptions


def test_an_engine_whose_client_ends_before_the_cluster_is_up_ends_quietly_and_leaves_nothing(
    short_directory: Path,
) -> None:
    client = subprocess.Popen([sys.executable, "-c", ""])
    client.wait()  # has ended before the engine checks it
    directory = short_directory / "cluster"
    directory.mkdir()
    options = EngineOptions(ClusterSettings("1x1x1"), str(directory), parent=client.pid)
    ended = subprocess.run(command("atoll.engines.engine_main", options), capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not directory.exists()
