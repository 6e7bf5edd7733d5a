"""(d): how long 4 B take to a device and back, and how fast 64 MB and 1 GiB go, beside a copy in memory.

JAX keeps the host's copy of an array that was read once, so every read here is of a new array: a jitted function's
result, ready before the clock starts. The result is checked outside the clock.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.harness.benchmark import Round, Settings

SMALL_BYTES = 4
LARGE_BYTES = 64_000_000
HUGE_BYTES = 1 << 30


def put_and_get(settings: Settings) -> Round:
    """float32 arrays, one device. Each metric is the median over a round's operations."""
    device = jax.devices()[0]
    add_one = jax.jit(lambda x: x + 1)
    small_repeats, large_repeats = settings.size(full=200, quick=50), settings.size(full=3, quick=2)
    huge_bytes = settings.size(full=HUGE_BYTES, quick=LARGE_BYTES)
    first_value = 0

    def put(value: jax.Array | np.ndarray) -> jax.Array:
        return jax.device_put(value, device).block_until_ready()

    def new_values(size: int, repeats: int) -> list[np.ndarray]:
        """Host arrays of which no two hold the same, in this round or another."""
        nonlocal first_value
        first_value += repeats
        return [np.full(size // 4, first_value + n, np.float32) for n in range(repeats)]

    def put_seconds(size: int, repeats: int) -> float:
        values = new_values(size, repeats)
        return seconds_each(put, values, expected=values)

    def get_seconds(size: int, repeats: int) -> float:
        values = new_values(size, repeats)
        arrays = [add_one(put(value)).block_until_ready() for value in values]
        return seconds_each(np.asarray, arrays, expected=[value + 1 for value in values])

    def round_trip_seconds(size: int, repeats: int) -> float:
        values = new_values(size, repeats)
        return seconds_each(lambda value: np.asarray(put(value)), values, expected=values)

    def copy_seconds(size: int, repeats: int) -> float:
        values = new_values(size, repeats)
        return seconds_each(np.array, values, expected=values)

    def measure() -> dict[str, float]:
        return {
            "put_small": 1e6 * put_seconds(SMALL_BYTES, small_repeats),
            "get_small": 1e6 * get_seconds(SMALL_BYTES, small_repeats),
            "round_trip_small": 1e6 * round_trip_seconds(SMALL_BYTES, small_repeats),
            "put_large": LARGE_BYTES / 1e9 / put_seconds(LARGE_BYTES, large_repeats),
            "get_large": LARGE_BYTES / 1e9 / get_seconds(LARGE_BYTES, large_repeats),
            "copy_large": LARGE_BYTES / 1e9 / copy_seconds(LARGE_BYTES, large_repeats),
            "put_huge": huge_bytes / 1e9 / put_seconds(huge_bytes, 1),
            "get_huge": huge_bytes / 1e9 / get_seconds(huge_bytes, 1),
            "copy_huge": huge_bytes / 1e9 / copy_seconds(huge_bytes, 1),
        }

    measure()
    return measure


def seconds_each(
    operation: Callable[[Any], Any], inputs: Sequence[jax.Array | np.ndarray], expected: Sequence[np.ndarray]
) -> float:
    """Return the median time of an operation on these inputs, one after the other."""
    durations, results = [], []
    for each in inputs:
        started = time.perf_counter()
        results.append(operation(each))
        durations.append(time.perf_counter() - started)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(result), wanted)
    return statistics.median(durations)
