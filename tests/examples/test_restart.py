"""Tests of the restart example: killed and restarted, it continues with the same losses."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jax.profiler import ProfileData

from tests.forked_process import Popen
from tests.scripts import script_environment

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "restart.py"
STEPS, EVERY, KILLED_AFTER = 21, 5, 13
DEADLINE = 300.0

Start = Callable[[Path], "subprocess.Popen[str]"]

# The parts have tests in the suite: `test_data_end_to_end`, `test_checkpoints`, `test_profiler`, `test_ownership`.
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(3 * DEADLINE)]


@pytest.fixture(scope="module")
def start(program_cache: Path) -> Iterator[Start]:
    """Start the example in a directory, on an island of two hosts."""
    runtime = Path(tempfile.mkdtemp(prefix="at-"))  # unix sockets need short paths
    count = itertools.count()

    def start(directory: Path) -> subprocess.Popen[str]:
        directory.mkdir(exist_ok=True)
        own = runtime / str(next(count))
        own.mkdir(mode=0o700)
        return Popen(
            [sys.executable, str(SCRIPT), str(directory), "--steps", str(STEPS), "--every", str(EVERY)],
            env=script_environment(own, program_cache, "1x2x2"),
            cwd=own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    yield start
    shutil.rmtree(runtime, ignore_errors=True)


@pytest.fixture(scope="module")
def runs(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the directory of a run that was killed and restarted, and the output after the restart."""
    directory = tmp_path_factory.mktemp("restart") / "run"
    killed = start(directory)
    kill_after(killed, directory, KILLED_AFTER)
    return directory, to_its_end(start(directory))


def to_its_end(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, printed[-4000:]
    return printed


def losses(directory: Path) -> dict[int, set[str]]:
    """Return the exact losses of each step, from every run that has reached it."""
    found: dict[int, set[str]] = {}
    for line in (directory / "losses").read_text().splitlines():
        number, loss = line.split()
        found.setdefault(int(number), set()).add(loss)
    return found


def kill_after(process: subprocess.Popen[str], directory: Path, steps: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while not (directory / "losses").exists() or len((directory / "losses").read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, f"the run does not come to step {steps}"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_killed_run_that_is_started_again_has_the_same_losses_bit_for_bit(runs: tuple[Path, str]):
    directory, printed = runs
    # A checkpoint is written while the next steps run, and is complete before the next checkpoint.
    assert printed.startswith(("from step 5 on\n", "from step 10 on\n"))
    numbers = [int(line.split()[0]) for line in (directory / "losses").read_text().splitlines()]
    again = {number for number in numbers if numbers.count(number) > 1}
    assert again >= {11, 12, 13}  # by the first run after its checkpoint, and by the second run from its checkpoint
    assert {number: len(each) for number, each in losses(directory).items()} == dict.fromkeys(range(1, STEPS + 1), 1)


def test_the_loss_falls_and_the_devices_print_it(runs: tuple[Path, str]):
    directory, printed = runs
    found = [float.fromhex(loss) for _, (loss,) in sorted(losses(directory).items())]
    assert found[-1] < found[0] - 0.3
    assert f"step 20: loss {found[19]:.4f}" in printed


def test_each_run_has_a_profile_of_one_step_on_every_host(runs: tuple[Path, str]):
    directory, _ = runs
    profiles = list((directory / "profile" / "plugins" / "profile").iterdir())
    assert len(profiles) == 2
    for each in profiles:
        for host in (0, 1):
            planes = ProfileData.from_file(str(each / f"host_{host}.xplane.pb")).planes
            events = {event.name for plane in planes for line in plane.lines for event in line.events}
            assert any("jit_step" in event for event in events)
            assert any(event.startswith("all-reduce") for event in events)  # memory for the step's gradients
