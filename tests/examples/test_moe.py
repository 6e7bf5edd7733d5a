"""Tests of the mixture of experts on four islands: its losses equal the dense computation's, and only rows are
transferred.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.forked_process import run
from tests.quick_xla import quick

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
DEADLINE = 300.0

# Prints the losses of both methods, and the bytes of rows that hosts have received.
BOTH = """
import json, sys
import atoll
from examples.moe import Config, train

config = Config(width=16, layers=1, heads=2, seq=16, batch=4)
with atoll.connect(islands="4x1x1"):
    with atoll.trace() as spans:
        sparse = train(config, int(sys.argv[1]))
    received = sum(span.nbytes for span in spans if span.kind == "receive rows")
    print(json.dumps([sparse, train(config, int(sys.argv[1]), is_dense=True), received]))
"""

# `tests/end_to_end/programs/test_routing_of_programs.py` trains a layer of experts, and counts the bytes of rows.
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(DEADLINE + 10)]


def test_losses_are_those_of_the_dense_computation_and_bytes_are_as_counted_by_hand() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "ATOLL_"))}
    command = [sys.executable, "-c", BOTH, str(STEPS)]
    ended = run(command, env=quick(env), cwd=ROOT, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stderr[-4000:]
    sparse, dense, received = json.loads(ended.stdout.splitlines()[-1])
    assert sparse == pytest.approx(dense, rel=1e-5)
    assert sparse[-1] < sparse[0]
    layers, tokens, choices, width, experts = 1, 4 * 16, 2, 16, 4
    # Float32 rows go there and back, and so do their gradients. Each message also has three numbers of 4 bytes.
    assert received == STEPS * layers * 4 * (tokens * choices * width * 4 + experts * 3 * 4)
