"""A pipeline of stages that sleep, on real devices: its order and its messages count, and no core has to compute.

A stage calls Python, which sleeps. What such a call takes by itself is measured in the same run, and the table's step
is computed with that.
"""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

from benchmarks.harness.benchmark import Round, Settings

UNIT_SECONDS = 0.02  # a forward entry, and each half of a backward one
_CALLS = 10


def _sleep(seconds: float, x: Any) -> Any:
    time.sleep(seconds)
    return x


@cache
def _work() -> Any:
    """Multiplies by a weight, and sleeps: a unit forward, one for the gradient of its input, one for the weight's."""
    import jax

    def slept(x: Any) -> Any:
        return jax.pure_callback(partial(_sleep, UNIT_SECONDS), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def plain(weight: Any, x: Any) -> Any:
        return slept(weight * x)

    def forward(weight: Any, x: Any) -> Any:
        return slept(weight * x), (weight, x)

    def backward(kept: Any, gradient: Any) -> Any:
        weight, x = kept
        of_input = slept(weight * gradient)
        return slept((x * gradient).sum() + 0 * of_input.sum()), of_input

    work = jax.custom_vjp(plain)
    work.defvjp(forward, backward)
    return work


def prepare(settings: Settings) -> Round:
    import jax
    import numpy as np
    import optax

    import atoll
    from atoll.pipelines.entries import Times
    from benchmarks.paper.pipelines import NAMES

    stages = int(settings.point["stages"])
    microbatches = 2 * stages
    table = atoll.schedule(NAMES[int(settings.point["schedule"])], stages, microbatches)
    work = _work()

    def loss_fn(weights: Any, batch: Any) -> Any:
        x = batch
        for number, weight in enumerate(weights):
            x = work(weight, atoll.stage_boundary(x) if number else x)
        return x.mean()

    devices = [next(d for d in jax.devices() if d.slice_index == island) for island in range(stages)]
    pipe = atoll.pipeline(loss_fn, devices, microbatches, optax.sgd(1e-3), table)
    batch = np.ones((microbatches, 8), np.float32)
    state = pipe.init([np.float32(1)] * table.parts, batch)
    for _ in range(4):
        state, loss = pipe.step(state, batch)
    jax.block_until_ready(loss)
    once = jax.jit(lambda x: work(np.float32(1), x))
    x = jax.device_put(np.ones((1, 8), np.float32), devices[0])
    jax.block_until_ready(once(x))

    def measure() -> dict[str, float]:
        nonlocal state
        started = time.perf_counter()
        y = x
        for _ in range(_CALLS):
            y = once(y)
        jax.block_until_ready(y)
        unit = (time.perf_counter() - started) / _CALLS
        started = time.perf_counter()
        state, loss = pipe.step(state, batch)
        jax.block_until_ready((state, loss))
        step = time.perf_counter() - started
        check = table.check(Times(unit, 2 * unit, unit, unit))
        return {
            "step": step,
            "table": check.length,
            "bubble": 100 * (1 - (1 - check.bubble) * check.length / step),
            "ratio": step / check.length,
            "unit": 1000 * unit,
        }

    measure()
    return measure
