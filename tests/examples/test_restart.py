"""The restart example: killed in the middle and started again, it has the losses of a run that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import script_environment

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "restart.py"
STEPS, EVERY = 24, 5
DEADLINE = 100.0

Start = Callable[[Path], "subprocess.Popen[str]"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * DEADLINE)]


@pytest.fixture
def start(short_directory: Path, program_cache: Path) -> Start:
    """Starts the example on an island of two hosts."""

    def start(folder: Path) -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True)
        runtime = short_directory / f"{folder.name}-{time.monotonic_ns() % 1_000_000}"
        runtime.mkdir(mode=0o700)
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), "--steps", str(STEPS), "--every", str(EVERY)],
            env=script_environment(runtime, program_cache, "1x2x2"),
            cwd=short_directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


def to_its_end(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, printed[-4000:]
    return printed


def losses(folder: Path) -> dict[int, set[str]]:
    """By step, what every run that came to it has written, exactly."""
    found: dict[int, set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        number, loss = line.split()
        found.setdefault(int(number), set()).add(loss)
    return found


def kill_after(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while not (folder / "losses").exists() or len((folder / "losses").read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, f"the run does not come to step {steps}"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_killed_run_that_is_started_again_has_the_same_losses_bit_for_bit(start: Start, tmp_path: Path):
    whole = to_its_end(start(tmp_path / "whole"))
    killed = start(tmp_path / "killed")
    kill_after(killed, tmp_path / "killed", 13)
    resumed = to_its_end(start(tmp_path / "killed"))
    assert "from step 0 on" in whole
    assert "from step 10 on" in resumed
    assert "step 20: loss" in whole
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert sorted(losses(tmp_path / "whole")) == list(range(1, STEPS + 1))


def test_the_loss_falls(start: Start, tmp_path: Path):
    to_its_end(start(tmp_path / "whole"))
    found = [float.fromhex(loss) for _, (loss,) in sorted(losses(tmp_path / "whole").items())]
    assert found[-1] < found[0] - 0.3
