"""The demo script's losses, bit for bit, on Atoll and on stock JAX."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.harness.backends import environment_of
from benchmarks.harness.benchmark import Settings

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "gpt.py"
TINY = ["--steps", "12", "--batch", "8", "--seq", "32", "--width", "32", "--layers", "1", "--quiet"]
DEADLINE = 100.0  # seconds, for one run of the script

pytestmark = pytest.mark.timeout(2 * DEADLINE + 10)  # no test runs the script more than twice
each_sharding = pytest.mark.parametrize("sharding", ["data", "tensor"])


def run_script(backend: str, sharding: str) -> list[float]:
    """All losses of a tiny run.

    Every backend gets the same number of threads: XLA cuts a matrix product by the size of its thread pool:
    two runs of stock JAX itself differ in the last bits when their pools do.
    """
    with TemporaryDirectory(prefix="test-gpt-") as folder:
        losses = Path(folder) / "losses.json"
        command = [sys.executable, str(SCRIPT), *TINY, "--sharding", sharding, "--losses-out", str(losses)]
        ended = subprocess.run(
            command, env=environment_of(Settings(backend)), capture_output=True, text=True, timeout=DEADLINE
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        return [float.fromhex(loss) for loss in json.loads(losses.read_text())["losses"]]


@functools.cache
def stock_losses(sharding: str) -> list[float]:
    return run_script("stock", sharding)


def test_the_script_does_not_know_of_atoll():
    assert "import atoll" not in SCRIPT.read_text()


@pytest.mark.slow
@each_sharding
def test_losses_under_atoll_are_those_of_stock_jax_bit_for_bit(sharding: str):
    assert run_script("atoll", sharding) == stock_losses(sharding)


@pytest.mark.slow
def test_losses_on_stock_jax_repeat_bit_for_bit():
    assert run_script("stock", "tensor") == stock_losses("tensor")


@pytest.mark.slow
@each_sharding
def test_the_loss_falls(sharding: str):
    losses = stock_losses(sharding)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_how_the_work_is_cut_changes_nothing_but_rounding():
    assert stock_losses("tensor") == pytest.approx(stock_losses("data"), rel=1e-4)
