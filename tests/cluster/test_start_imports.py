"""Tests of what the processes of a cluster import before they begin, since each import delays the first result."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Modules that take long to import, and that few clusters need.
_RARE = ("email", "http.client", "importlib.metadata", "zipfile", "jax", "jaxlib")
_PROCESSES = {
    "atoll.engines.engine_main": (*_RARE, "atoll.journal", "numpy"),
    "atoll.controller_process.controller_main": (*_RARE, "numpy"),
    "atoll.ifrt.proxy_main": _RARE,
    "atoll.worker.worker_main": _RARE,
}


@pytest.mark.parametrize("module", _PROCESSES)
def test_a_process_imports_nothing_that_only_some_clusters_need(module: str) -> None:
    code = f"import sys, {module}\nprint([name for name in {_PROCESSES[module]!r} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.stdout.strip(), ended.returncode) == ("[]", 0), ended.stderr


def test_a_script_imports_no_state_of_the_controller_to_check_the_settings_of_its_cluster() -> None:
    code = (
        "import sys\nfrom atoll.cluster.settings import ClusterSettings\n"
        "from atoll.engines.start_engine import check_settings\ncheck_settings(ClusterSettings('1x1x1'))\n"
        "print([name for name in sys.modules if name.startswith(('atoll.state', 'atoll.engines.ray'))])"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.stdout.strip(), ended.returncode) == ("[]", 0), ended.stderr
