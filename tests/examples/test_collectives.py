"""Test of a short form of the example with collectives in flight."""

import sys
from pathlib import Path

from benchmarks.harness.backends import environment_of
from benchmarks.harness.benchmark import Settings
from tests.forked_process import of_server, run

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "collectives.py"


def test_unfenced_collectives_complete_with_right_results() -> None:
    environment = of_server(environment_of(Settings("atoll")))
    environment.pop("NPROC")  # as a user runs it
    ended = run([sys.executable, str(SCRIPT), "--calls", "1000"], env=environment, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "1000 AllReduces over 8 devices" in ended.stdout
    assert ended.stdout.strip().endswith("all right")
