"""Short form of `make soak`: random work on two islands of two hosts while processes are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 100


# `test_reads_under_faults` and `test_restarts` kill the same processes, one kind at a time.
@pytest.mark.slow
@pytest.mark.thorough
def test_while_processes_are_killed_nothing_is_wrong_hangs_or_is_left() -> None:
    command = [sys.executable, "-m", "scripts.soak", "--minutes", "0.15", "--every", "2", "--islands", "2x2x1"]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "NPROC"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no wrong result, no hang, nothing left" in ended.stdout
