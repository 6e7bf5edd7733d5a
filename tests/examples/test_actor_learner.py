"""Tests that the actor and the learner on two slices compute the same as one process that plays and learns in turn."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from examples.actor_learner import Played, first_params, loss_of, played
from tests.forked_process import run
from tests.quick_xla import quick

ROOT = Path(__file__).resolve().parents[2]
STEPS, POLES, RATE = 12, 16, 5e-3
DEADLINE = 300.0
TRAINED = """
import json, sys
import atoll
from examples.actor_learner import train

with atoll.connect(islands="2x1x1"):
    print(json.dumps(train(*map(int, sys.argv[1:]))))
"""

# `tests/end_to_end/programs/test_routing_of_programs.py` has an actor and a learner on two slices.
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(DEADLINE + 10)]


def in_turn() -> list[float]:
    """Return the result of `train` for stock JAX. Each step learns from the previous step's games."""
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(RATE))
    params: Any = first_params(0)
    state = optimizer.init(params)
    poles, key, play = np.zeros((POLES, 4), np.float32), jax.random.key(0), jax.jit(played)
    gradient = jax.jit(jax.grad(loss_of))
    poles, key, game = play(params, poles, key)
    stood = []
    for _ in range(STEPS):
        poles, key, following = play(params, poles, key)
        updates, state = optimizer.update(gradient(params, Played(*game)), state)
        params = optax.apply_updates(params, updates)
        stood.append(1 / max(float(game.fell.mean()), 1e-3))
        game = following
    return stood


def test_on_two_slices_the_same_is_learnt_as_in_one_process() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "ATOLL_"))}
    command = [sys.executable, "-c", TRAINED, str(STEPS), str(POLES)]
    ended = run(command, env=quick(env), cwd=ROOT, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stderr[-4000:]
    with jax.enable_x64(False):
        assert json.loads(ended.stdout) == pytest.approx(in_turn(), rel=1e-5)
