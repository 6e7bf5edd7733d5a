"""(aj): how long `jax.device_put` of a tree takes that is already on devices, beside stock JAX.

The tree has as many arrays as a large model has layers. Each round moves new arrays, which are ready before the clock
starts. The results are checked after it stops.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.harness.benchmark import Round, Settings

ARRAYS, ROWS, COLUMNS = 78, 256, 256  # 256 KiB each
DEVICES = 4

Tree = list[jax.Array]


def move_trees(settings: Settings) -> Round:
    """Measure the median time of each move, in ms."""
    devices = jax.devices()
    one, other = (Mesh(np.array(each), ("x",)) for each in (devices[:DEVICES], devices[DEVICES : 2 * DEVICES]))
    half, other_half = (Mesh(np.array(each), ("x",)) for each in (devices[:2], devices[2:DEVICES]))
    by_rows = P("x")
    moves = {
        "axis": (NamedSharding(one, by_rows), NamedSharding(one, P(None, "x"))),
        "devices": (NamedSharding(half, by_rows), NamedSharding(other_half, by_rows)),
        "spread": (SingleDeviceSharding(devices[0]), NamedSharding(one, P())),
        "island": (NamedSharding(one, by_rows), NamedSharding(other, by_rows)),
    }
    repeats, arrays = settings.size(full=5, quick=2), settings.size(full=ARRAYS, quick=4)
    first = 0

    def new_values() -> list[np.ndarray]:
        nonlocal first
        first += arrays
        return [np.full((ROWS, COLUMNS), first + n, np.float32) for n in range(arrays)]

    def timed(source: NamedSharding, move: Callable[[Tree], Sequence[jax.Array]]) -> float:
        durations = []
        for _ in range(repeats):
            values = new_values()
            tree = jax.block_until_ready(jax.device_put(values, source))
            started = time.perf_counter()
            moved = jax.block_until_ready(move(tree))
            durations.append(time.perf_counter() - started)
            for value, array in zip(values, moved, strict=True):
                np.testing.assert_array_equal(np.asarray(array), value)
        return 1e3 * statistics.median(durations)

    def measure() -> dict[str, float]:
        found = {
            name: timed(source, partial(jax.device_put, device=target)) for name, (source, target) in moves.items()
        }
        source, target = moves["island"]
        found["island_singly"] = timed(source, lambda tree: [jax.device_put(array, target) for array in tree])
        return found

    measure()
    return measure
