"""(aa): the loop of a serving engine. It launches a step of decoding, then reads the tokens of the previous step.

Each step also gets an array of the host, as engines pass the pages of their caches. So a step is a put, a launch and a
read, and the devices are busy as long as these three take less time than a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.order import ELEMENTS, MILLISECOND_LOOPS

MILLISECONDS = (2, 5, 10, 20)  # of a step, about
SEQUENCES, PAGES = 32, 16


def serving(settings: Settings) -> Round:
    """Measure the rate of steps of each length."""
    loops = {milliseconds: _loop(milliseconds) for milliseconds in MILLISECONDS}
    total = settings.size(full=1000, quick=200)  # milliseconds of computation per length and round

    def measure() -> dict[str, float]:
        return {f"steps_{milliseconds}": run(total // milliseconds) for milliseconds, run in loops.items()}

    measure()
    return measure


def _loop(milliseconds: int) -> Callable[[int], float]:
    """Return a function that decodes a number of steps and returns their rate, in steps per second."""
    device = jax.devices()[0]

    def compute(state: jax.Array, tokens: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the state, and the next token of each sequence: a token is the number of its step."""
        state = jax.lax.fori_loop(0, milliseconds * MILLISECOND_LOOPS, lambda _, v: jnp.sin(v) + 1.0, state)
        return state, jnp.where(jnp.isnan(state[0]), -1, tokens + pages[:, 0])

    step = jax.jit(compute)
    pages = np.ones((SEQUENCES, PAGES), np.int32)
    zeros = jax.device_put(np.zeros(SEQUENCES, np.int32), device)
    start = jax.device_put(np.zeros(ELEMENTS, np.float32), device)

    def run(steps: int) -> float:
        state, tokens = step(start, zeros, pages.copy())
        read = []
        began = time.perf_counter()
        for _ in range(steps):
            former = tokens
            state, tokens = step(state, former, pages.copy())
            read.append(np.asarray(former))
        rate = steps / (time.perf_counter() - began)
        np.testing.assert_array_equal(np.stack(read)[:, 0], np.arange(1, steps + 1))
        jax.block_until_ready((state, tokens))
        return rate

    return run
