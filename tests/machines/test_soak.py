"""Run a short form of `make soak ARGS="--machines 3"`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines.clusters import environment
from tests.machines.plugin import long, machines, make_machines  # noqa: F401

ROOT = Path(__file__).parents[2]
SECONDS = 400  # 75 of them for the soak itself, in which it waits for nothing


@pytest.mark.slow
@long
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.usefixtures("machines")  # without permission for namespaces, this is skipped
def test_while_machines_and_links_are_struck_nothing_is_wrong_hangs_or_is_left() -> None:
    command = [sys.executable, "-m", "scripts.soak", "--minutes", "1.25", "--every", "3", "--machines", "3"]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    print(ended.stdout)  # with the seed
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no wrong result, no hang, nothing left" in ended.stdout
