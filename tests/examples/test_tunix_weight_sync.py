"""Tests of the example with Tunix's weight sync: all workers serve weights of one step, also after a round
that fails.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import script_environment

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "tunix_weight_sync.py"
_HAS_TUNIX = importlib.util.find_spec("tunix") is not None


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_TUNIX, reason="Tunix is not installed: pip install git+https://github.com/google/tunix")
def test_all_workers_serve_the_weights_of_one_step(short_directory: Path, program_cache: Path) -> None:
    environment = script_environment(short_directory, program_cache, "2x1x4") | {"JAX_PLATFORMS": "atoll"}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment,
        cwd=short_directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.splitlines() == [
        "step 1: committed, workers serve [1.0, 1.0]",
        "step 2: committed, workers serve [2.0, 2.0]",
        "step 3: committed, workers serve [3.0, 3.0]",
        "step 4: aborted, workers serve [3.0, 3.0]",
    ]
