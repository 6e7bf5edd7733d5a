"""Tests that processes with CPU devices start JAX without a search for plug-ins."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

from atoll.devices.hidden_plugins import hidden_plugins

_OPEN = """
import json, os, sys
read = []
names = ("METADATA", "PKG-INFO", "entry_points.txt")
sys.addaudithook(lambda event, found: event == "open" and str(found[0]).endswith(names) and read.append(str(found[0])))
import atoll.worker.worker_main as worker_main
from atoll.cluster.processes.startup_heartbeat import StartupHeartbeat
from atoll.worker.worker_options import WorkerOptions
backend = worker_main.open_devices(WorkerOptions("", "", 0, 0, 2, os.getppid()), StartupHeartbeat(-1))
sys.stdout.write(json.dumps([len(backend.devices), read]))
sys.stdout.flush()
os._exit(0)
"""


def test_a_worker_with_cpu_devices_reads_the_metadata_of_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    ended = subprocess.run([sys.executable, "-c", _OPEN], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [2, []]


def test_other_platforms_find_their_plugins() -> None:
    search = importlib.metadata.distributions
    with hidden_plugins("cuda"):
        assert importlib.metadata.distributions is search


def test_only_the_search_is_hidden_and_only_within_the_block() -> None:
    with hidden_plugins("cpu"):
        assert not list(importlib.metadata.distributions())
        assert not importlib.metadata.entry_points(group="jax_plugins")
        assert importlib.metadata.version("jax")
    assert list(importlib.metadata.distributions())


def test_an_error_within_the_block_ends_it() -> None:
    def fail() -> None:
        with hidden_plugins("cpu"):
            raise ValueError("JAX cannot start")

    with pytest.raises(ValueError, match="JAX cannot start"):
        fail()
    assert list(importlib.metadata.distributions())
