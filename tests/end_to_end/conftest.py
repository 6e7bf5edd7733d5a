"""Fixtures of the end-to-end tests: children with JAX on Atoll, and clusters that last for a whole module.

Test modules must not import this module or `tests.conftest`, because children import test modules.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.cluster.settings import GRACE_SECONDS
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.same import assert_same
from tests.end_to_end.script_process import Script, StartScript
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.forked_process import EXECUTED, FORKING, with_forked_children
from tests.scripts import script_environment


def pytest_itemcollected(item: pytest.Item) -> None:
    if "shared_python" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.together(str(item.path.parent)))


def _standing(islands: str) -> dict[str, str]:
    """Return the environment that leads a client to a standing cluster with these islands (see `tests/machines`), if
    any.
    """
    found = os.environ.get(f"ATOLL_TEST_CLUSTER_{islands.upper()}", "")
    return {"ATOLL_JOIN": found} if found else {}


@pytest.fixture(scope="module")
def module_directory() -> Iterator[Path]:
    """Create a private directory of the module, with a path that is short enough for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="at-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _start(directory: Path, program_cache: Path, islands: str, **environment: str) -> RemotePython:
    directory.mkdir(mode=0o700)
    base = script_environment(directory, program_cache, islands) | {"JAX_ENABLE_X64": "1"}
    return RemotePython(base | _standing(islands) | environment, directory)


@pytest.fixture(scope="module")
def start_python(module_directory: Path, program_cache: Path) -> Iterator[StartPython]:
    """Start a child in which functions can be called on Atoll: `start_python(islands="1x1x4", **environment)`."""
    started: list[RemotePython] = []

    def start(islands: str = "1x1x4", **environment: str) -> RemotePython:
        directory = module_directory / f"python-{len(started)}"
        started.append(_start(directory, program_cache, islands, **environment))
        return started[-1]

    yield start
    # Later children may use clusters of earlier ones.
    for python in reversed(started):
        python.close()


@pytest.fixture(scope="session")
def shared_python(program_cache: Path) -> Iterator[Callable[[str], RemotePython]]:
    """Return the child with these islands that modules share, each of which leaves it unchanged:
    `shared_python("1x1x4")`.
    """
    directory, started = Path(tempfile.mkdtemp(prefix="at-")), dict[str, list[RemotePython]]()

    def find(islands: str) -> RemotePython:
        those = started.setdefault(islands, [])
        if not those or those[-1].process.poll() is not None:
            with FORKING.on():
                those.append(_start(directory / f"{islands}-{len(those)}", program_cache, islands))
        return those[-1]

    yield find
    for those in started.values():
        for python in those:
            python.close()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def atoll_python(shared_python: Callable[[str], RemotePython]) -> RemotePython:
    """Return a child that modules share, with an embedded cluster of one island with four devices."""
    return shared_python("1x1x4")


@pytest.fixture(scope="module")
def two_hosts_python(shared_python: Callable[[str], RemotePython]) -> RemotePython:
    """Return a child that modules share, with an embedded cluster of one island with two hosts."""
    return shared_python("1x2x2")


@pytest.fixture
def same_as_stock(atoll_python: RemotePython) -> Callable[..., None]:
    """Return a function that calls a function on Atoll and on stock JAX, and compares the results."""

    def check(function: Callable[..., Any], *arguments: Any) -> None:
        assert_same(atoll_python.call(function, *arguments), function(*arguments))

    return check


@pytest.fixture(scope="module")
def two_islands_python(start_python: StartPython) -> RemotePython:
    """Return a child with an embedded cluster of two islands with two devices each."""
    return start_python("2x1x2")


@pytest.fixture(scope="module")
def start_cluster(module_directory: Path, program_cache: Path) -> Iterator[StartCluster]:
    """Start a cluster that lasts for the module: `start_cluster(environment={}, islands="1x1x4", **options)`."""
    started: list[StandingCluster] = []

    def start(environment: dict[str, str] | None = None, **options: Any) -> StandingCluster:
        directory = module_directory / f"cluster-{len(started)}"
        directory.mkdir(mode=0o700)
        base = script_environment(directory, program_cache)
        started.append(StandingCluster(directory, base | (environment or {}), **options))
        return started[-1]

    yield start
    for standing in started:
        standing.stop()


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    """Start a cluster of one island with four devices that lasts for the module."""
    return start_cluster()


@pytest.fixture(scope="module")
def journaled_cluster(start_cluster: StartCluster, module_directory: Path) -> StandingCluster:
    """Start a cluster of two islands with two devices each, whose controller may be killed because it has a journal."""
    journal = str(module_directory / "journal")
    return start_cluster(islands="2x1x2", journal=journal, grace_seconds=GRACE_SECONDS)


@pytest.fixture
def start_script(program_cache: Path) -> Iterator[StartScript]:
    """Start a script on an embedded cluster: `start_script(code, islands="1x1x1", **environment)`.

    With `is_executed`, the script is not forked, so that its interpreter is finalized as that of a user's script.
    """
    started: list[Script] = []

    def start(code: str, islands: str = "1x1x1", is_executed: bool = False, **environment: str) -> Script:
        directory = Path(tempfile.mkdtemp(prefix="at-"))
        base = script_environment(directory, program_cache, islands)
        if is_executed:
            base = with_forked_children(base) | {EXECUTED: "script.py"}
        started.append(Script(code, directory, base | environment))
        return started[-1]

    yield start
    for script in started:
        script.end()
        shutil.rmtree(script.directory, ignore_errors=True)
