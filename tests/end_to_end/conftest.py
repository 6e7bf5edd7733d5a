"""What the end-to-end tests share: children with JAX on Atoll, and clusters that stay for a whole module."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import script_environment
from tests.end_to_end.remote_python import RemotePython
from tests.end_to_end.standing_cluster import StandingCluster

StartPython = Callable[..., RemotePython]


@pytest.fixture(scope="module")
def module_directory() -> Iterator[Path]:
    """A private folder of the module, whose path leaves room for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="at-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def start_python(module_directory: Path, program_cache: Path) -> Iterator[StartPython]:
    """Starts a child in which functions can be called on Atoll: `start_python(islands="1x1x4", **environment)`."""
    started: list[RemotePython] = []

    def start(islands: str = "1x1x4", **environment: str) -> RemotePython:
        folder = module_directory / f"python-{len(started)}"
        folder.mkdir(mode=0o700)
        base = script_environment(folder, program_cache, islands) | {"JAX_ENABLE_X64": "1"}
        started.append(RemotePython(base | environment, folder))
        return started[-1]

    yield start
    for python in started:
        if python.process.poll() is None:
            python.close()


@pytest.fixture(scope="module")
def atoll_python(start_python: StartPython) -> RemotePython:
    """A child with an embedded cluster of one island with four devices."""
    return start_python()


@pytest.fixture(scope="module")
def two_islands_python(start_python: StartPython) -> RemotePython:
    """A child with an embedded cluster of two islands with two devices each."""
    return start_python("2x1x2")


@pytest.fixture(scope="module")
def cluster(module_directory: Path, program_cache: Path) -> Iterator[StandingCluster]:
    """A cluster that stays, of one island with four devices."""
    standing = StandingCluster(module_directory, script_environment(module_directory, program_cache))
    yield standing
    standing.stop()
