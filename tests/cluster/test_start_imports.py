"""Tests of what the processes of a cluster import before they begin, since each import delays the first result."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Modules that take long to import, and that few clusters need.
_RARE = ("email", "http.client", "importlib.metadata", "tomllib", "zipfile", "jax", "jaxlib")
_PROCESSES = {
    "atoll.engines.engine_main": (*_RARE, "atoll.journal", "numpy"),
    "atoll.controller_process.controller_main": (*_RARE, "numpy"),
    "atoll.ifrt.proxy_main": _RARE,
    "atoll.worker.worker_main": _RARE,
}


def imported(packages: tuple[str, ...], statements: str) -> list[str]:
    """Return the modules of these packages that a new process has imported after these statements."""
    code = f"import sys\n{statements}\nprint(*sys.modules)"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return [name for name in ended.stdout.split() if any(f"{name}.".startswith(f"{each}.") for each in packages)]


@pytest.mark.parametrize("module", _PROCESSES)
def test_a_process_imports_nothing_that_only_some_clusters_need(module: str) -> None:
    assert imported(_PROCESSES[module], f"import {module}") == []


def test_a_script_imports_no_state_of_the_controller_to_check_the_settings_of_its_cluster() -> None:
    statements = (
        "from atoll.cluster.settings import ClusterSettings\n"
        "from atoll.engines.start_engine import check_settings\n"
        "check_settings(ClusterSettings('1x1x1'))"
    )
    assert imported(("atoll.state", "atoll.engines.ray"), statements) == []


def test_a_script_starts_its_processes_before_it_imports_what_only_their_connection_needs() -> None:
    found = imported(
        ("atoll.client.jax_patches", "atoll.protocol", "atoll.wire.connection"), "import atoll.client.backend"
    )
    assert found == []
