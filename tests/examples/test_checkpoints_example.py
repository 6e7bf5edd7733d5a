"""Tests of the example with checkpoints: killed and restarted, it continues as if it had not been interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import script_environment, start_process

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "checkpoints.py"
DEADLINE = 300.0


def losses(lines: list[str]) -> dict[int, str]:
    return {int(line.split()[1]): line.split()[3] for line in lines if line.startswith("step ")}


@pytest.mark.slow
@pytest.mark.thorough  # `tests/end_to_end/test_checkpoints.py` saves and restores in the same ways
def test_a_run_that_is_killed_goes_on_with_the_same_losses(
    tmp_path: Path, short_directory: Path, program_cache: Path
) -> None:
    environment = script_environment(short_directory, program_cache, "1x2x2")
    command = [sys.executable, str(SCRIPT), "--directory", str(tmp_path / "run"), "--steps", "14", "--every", "3"]

    def start() -> subprocess.Popen[str]:
        return start_process(command, environment, short_directory)

    killed = start()
    assert killed.stdout is not None
    before = []
    for line in killed.stdout:
        before.append(line)
        if line.startswith("step 10 "):
            os.killpg(killed.pid, signal.SIGKILL)
            break
    _, errors = killed.communicate(timeout=DEADLINE)
    assert len(before) == 11, errors[-4000:]

    again = start()
    out, errors = again.communicate(timeout=DEADLINE)
    assert again.returncode == 0, errors[-4000:]
    lines = out.splitlines()
    assert lines[0] in ("restored step 3", "restored step 6", "restored step 9")
    assert lines[-1] == "done"
    first, second = losses(before), losses(lines)
    assert sorted(first | second) == list(range(14))
    overlap = sorted(first.keys() & second.keys())
    assert overlap
    assert [first[number] for number in overlap] == [second[number] for number in overlap]
