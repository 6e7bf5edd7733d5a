"""(n): the cost of a callback into the script's Python: in a loop of a program, in a call, and per byte."""

from collections.abc import Callable

import jax
import numpy as np

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.transfers import seconds_each

LARGE_BYTES = 4_000_000


def callbacks(settings: Settings) -> Round:
    """float32 arrays on one device; every callback adds one, so that the result counts them."""
    loops, repeats = settings.size(full=400, quick=50), settings.size(full=20, quick=5)
    device = jax.devices()[0]

    def one(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda x: np.asarray(x) + np.float32(1), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    looped = jax.jit(lambda x: jax.lax.fori_loop(0, loops, lambda _, x: one(x), x))
    call = jax.jit(one)

    def seconds(function: Callable[[jax.Array], jax.Array], size: int, repeats: int, adds: int) -> float:
        values = [np.full(size // 4, n, np.float32) for n in range(repeats)]
        arrays = [jax.device_put(value, device).block_until_ready() for value in values]
        expected = [value + np.float32(adds) for value in values]
        return seconds_each(lambda x: function(x).block_until_ready(), arrays, expected)

    def measure() -> dict[str, float]:
        return {
            "looped": 1e3 * seconds(looped, 4, 1, loops) / loops,
            "call": 1e3 * seconds(call, 4, repeats, 1),
            "bytes": 2 * LARGE_BYTES / 1e9 / seconds(call, LARGE_BYTES, repeats, 1),
        }

    measure()
    return measure
