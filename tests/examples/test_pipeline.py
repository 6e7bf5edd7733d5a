"""The pipeline example: losses of any number of stages are those of one SPMD function; stages overlap."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pipeline.py"
DEADLINE = 110.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE + 10)]


@functools.cache
def run(*arguments: str) -> tuple[list[float], list[dict[str, object]], str]:
    """Losses, the events of the last step's trace, and what was printed."""
    with TemporaryDirectory(prefix="test-pipeline-") as folder:
        losses, trace = Path(folder) / "losses.json", Path(folder) / "trace.json"
        command = [sys.executable, str(SCRIPT), "--steps", "4", "--losses-out", str(losses), "--trace", str(trace)]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "ATOLL_"))}
        ended = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=DEADLINE)
        assert ended.returncode == 0, ended.stderr[-4000:]
        events = json.loads(trace.read_text())["traceEvents"] if trace.exists() else []
        return json.loads(losses.read_text()), events, ended.stdout


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_losses_of_a_pipeline_are_those_of_one_spmd_function_within_rounding(stages: int):
    spmd, _, _ = run("--stages", "1", "--spmd")
    losses, _, _ = run("--stages", str(stages))
    assert losses == pytest.approx(spmd, rel=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_the_stages_of_a_step_overlap():
    _, events, printed = run("--stages", "4")
    calls = [event for event in events if event.get("cat") == "call"]
    # Forward, backward and sums of 8 micro-batches, and the updates; the last stage does both ways in one.
    assert {island: sum(c["args"]["nodes"] for c in calls if c["pid"] == island) for island in range(4)} == {
        0: 24,
        1: 24,
        2: 24,
        3: 16,
    }
    at_a_time = float(re.search(r"([0-9.]+) stages computed at a time", printed).group(1))
    assert at_a_time > 1.05
