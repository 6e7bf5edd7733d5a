"""(c): the demo's training step, as a loop that reads nothing until the end."""

import math
import time

import jax

from benchmarks.harness.benchmark import Round, Settings
from examples.gpt import Config, Sharding, State, batches, make_mesh, make_training, read_corpus


def gpt_step(settings: Settings) -> Round:
    """Data-parallel over all devices; a step is one call and one batch put on the devices."""
    steps = settings.size(full=60, quick=20)
    config = Config(batch=32)
    state, step, batch_sharding = make_training(config, make_mesh(Sharding.DATA))
    data = batches(read_corpus(), config)

    def run(state: State, steps: int) -> tuple[State, jax.Array]:
        for _ in range(steps):
            state, loss = step(state, jax.device_put(next(data), batch_sharding))
        return state, loss.block_until_ready()

    state, first_loss = run(state, 3)

    def measure() -> dict[str, float]:
        nonlocal state
        started = time.perf_counter()
        state, loss = run(state, steps)
        seconds = time.perf_counter() - started
        if not math.isfinite(float(loss)) or float(loss) >= float(first_loss):
            raise ArithmeticError(f"the loss went from {float(first_loss)} to {float(loss)}: nothing was learnt")
        return {"rate": steps / seconds, "step": 1000 * seconds / steps}

    return measure
