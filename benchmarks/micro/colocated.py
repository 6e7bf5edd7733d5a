"""(o): what a call of colocated Python costs. Stock JAX calls the function in the script's own process."""

import time
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.transfers import seconds_each

LARGE_BYTES = 64_000_000


def calls(settings: Settings) -> Round:
    """float32 arrays on one device; every call adds one, in NumPy."""
    repeats, pipelined = settings.size(full=50, quick=10), settings.size(full=200, quick=20)
    large_repeats = settings.size(full=3, quick=2)
    device = jax.devices()[0]

    def one_more(x: jax.Array) -> jax.Array:
        return jax.device_put(np.asarray(x) + np.float32(1), x.sharding)

    add_one: Any = colocated_python.colocated_python(one_more).specialize(out_specs_fn=lambda x: x)

    def seconds(size: int, repeats: int) -> float:
        values = [np.full(size // 4, n, np.float32) for n in range(repeats)]
        arrays = [jax.device_put(value, device).block_until_ready() for value in values]
        return seconds_each(lambda x: add_one(x).block_until_ready(), arrays, [value + 1 for value in values])

    def rate() -> float:
        x = jax.device_put(np.zeros(1, np.float32), device)
        started = time.perf_counter()
        for _ in range(pipelined):
            x = add_one(x)
        x.block_until_ready()
        elapsed = time.perf_counter() - started
        if float(x[0]) != pipelined:
            raise ArithmeticError(f"{pipelined} calls have added {float(x[0])}")
        return pipelined / elapsed

    def measure() -> dict[str, float]:
        return {
            "call": 1e3 * seconds(4, repeats),
            "pipelined": rate(),
            "bytes": 2 * LARGE_BYTES / 1e9 / seconds(LARGE_BYTES, large_repeats),
        }

    measure()
    return measure
