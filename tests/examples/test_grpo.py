"""Tests of the post-training example: its policy learns, even if the trainer is killed during the run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from examples.grpo import first_state, generate, learn
from tests.conftest import script_environment, start_process
from tests.lines import next_line

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"
DEADLINE = 600.0


# `tests/end_to_end/test_arrays_between_scripts.py` has what the example uses of Atoll.
@pytest.mark.thorough
def test_the_policy_learns_on_stock_jax() -> None:
    with jax.enable_x64(False):
        state, key = first_state(), jax.random.key(0)
        rewards = []
        for _ in range(90):
            key, now = jax.random.split(key)
            state = learn(state, [generate(state["params"], now)])
            rewards.append(float(state["reward"]))
    assert rewards[0] == pytest.approx(0.1, abs=0.05)
    assert sum(rewards[-5:]) / 5 > 0.5


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(DEADLINE + 60)
def test_a_trainer_that_is_killed_resumes_and_the_policy_learns(
    tmp_path: Path, short_directory: Path, program_cache: Path
) -> None:
    environment = script_environment(short_directory, program_cache, "2x1x4")
    up = [sys.executable, "-m", "atoll.operate.command", "up", "--islands", "2x1x4", "--foreground"]
    cluster = start_process(up, environment, short_directory)
    started = [cluster]
    try:
        address = re.search(r"unix:\S+", next_line(cluster))
        assert address is not None
        environment |= {"ATOLL_ADDRESS": address[0], "JAX_PLATFORMS": "atoll"}
        environment.pop("ATOLL_ISLANDS", None)

        def start(*arguments: str) -> subprocess.Popen[str]:
            started.append(start_process([sys.executable, str(SCRIPT), *arguments], environment, short_directory))
            return started[-1]

        for number in ("0", "1"):
            start("worker", "--number", number)
        curve = tmp_path / "curve.json"
        trainer = start("trainer", "--curve", str(curve))
        while "step 40:" not in next_line(trainer):
            assert trainer.poll() is None
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.communicate()
        again = start("trainer", "--curve", str(curve))
        output, errors = again.communicate(timeout=DEADLINE)
        assert again.returncode == 0, errors[-4000:]
        resumed = re.match(r"resumed at step (\d+)", output)
        assert resumed is not None, output
        assert int(resumed[1]) > 30
        rewards = [reward for _, reward in json.loads(curve.read_text())]
        assert sum(rewards[-10:]) / 10 > 0.9
    finally:
        for each in reversed(started):
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGTERM if each is cluster else signal.SIGKILL)
                each.communicate()
