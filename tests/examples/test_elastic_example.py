"""Tests of the elastic example: it loses an island, and has the losses of an undisturbed training."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from examples import elastic
from tests.forked_process import Popen, children
from tests.scripts import script_environment

SCRIPT = Path(elastic.__file__)
STEPS, ISLANDS = 120, 2

# `tests/end_to_end/test_elastic.py` trains in the same way.
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(120)]


@pytest.fixture
def script(program_cache: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Return the example, and the path to which it writes its losses."""
    directory = Path(tempfile.mkdtemp(prefix="at-"))
    arguments = ["--islands", str(ISLANDS), "--steps", str(STEPS), "--losses-out", str(directory / "losses")]
    process = Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=script_environment(directory, program_cache),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield process, directory / "losses"
    process.kill()
    process.communicate()
    shutil.rmtree(directory, ignore_errors=True)


def worker(process: subprocess.Popen[str], island: int) -> psutil.Process:
    for child in children(process.pid, recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:  # such as one that a compilation has ended
            continue
        if "atoll.worker.worker_main" in command and f'"island":{island},' in command:
            return child
    raise AssertionError(f"island {island} has no worker")


def undisturbed() -> list[float]:
    """Return the losses of stock JAX on one device."""
    compute, update = jax.jit(elastic.gradients), jax.jit(elastic.update)
    state, losses = elastic.first_state(), []
    for step in range(STEPS):
        gradient, loss = compute(state, elastic.batch(step))
        state = update(state, gradient)
        losses.append(float(loss))
    return losses


def test_a_killed_island_costs_no_step_and_no_loss(script: tuple[subprocess.Popen[str], Path]) -> None:
    process, losses = script
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("step 50:"):
            worker(process, 1).kill()
    assert process.wait() == 0, printed
    assert " (lost): trains on island" in printed
    np.testing.assert_allclose(json.loads(losses.read_text()), undisturbed(), rtol=1e-4)
