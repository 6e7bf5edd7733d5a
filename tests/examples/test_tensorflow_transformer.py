"""Tests of the TensorFlow example: on two islands, its losses are those of TensorFlow's own run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.scripts import RunScript

pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "tensorflow_transformer.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not os.environ.get("ATOLL_TEST_TENSORFLOW"), reason="this takes a while: `make tensorflow`"),
]


def test_losses_are_those_of_tensorflow(run_script: RunScript, tmp_path: Path):
    losses = tmp_path / "losses.json"
    arguments = ("--islands", "2", "--steps", "4", "--losses-out", str(losses))
    env = {"JAX_PLATFORMS": None, "ATOLL_ISLANDS": None}
    run_script(SCRIPT, *arguments, env=env, timeout=280.0).check()
    found = json.loads(losses.read_text())
    assert len(found["atoll"]) == 4
    assert found["atoll"] == pytest.approx(found["tensorflow"], rel=1e-4)
    assert found["atoll"][-1] < found["atoll"][0] - 0.3
