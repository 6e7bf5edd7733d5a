"""(p): how many batches a second a grain pipeline brings to the devices, each used by a jitted function.

Atoll runs the pipeline on the hosts (`atoll.data`), stock JAX in the script, which puts each batch on the devices.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import grain
import jax
import numpy as np
from jax import NamedSharding, P
from jax.sharding import Mesh

from atoll.data import Batches, Shard
from benchmarks.harness.benchmark import Round, Settings

ROWS = 64
SIZES = {"small": 4_000, "large": 4_000_000}  # bytes of a batch
STOCK = "stock"


def pipeline(size: int, shard: Shard) -> grain.MapDataset:
    """Row n of the data is full of n: made, not read, so that no disk is measured."""
    rows = grain.MapDataset.range(1 << 40)[shard.index :: shard.count]
    return rows.map(lambda n: np.full(size // ROWS // 4, n, np.float32)).batch(ROWS // shard.count)


def batches(settings: Settings) -> Round:
    """Return an iterator of batches on all devices, with sharded rows.

    The sum of the first column identifies each batch.
    """
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    counts = {"small": settings.size(full=150, quick=20), "large": settings.size(full=60, quick=10)}
    first_column = jax.jit(lambda batch: batch[:, 0].sum())

    def opened(size: int) -> Iterator[Any]:
        if settings.system == STOCK:
            return (jax.device_put(batch, sharding) for batch in iter(pipeline(size, Shard(0, 1))))
        return iter(Batches(partial(pipeline, size), sharding))

    iterators = {name: opened(size) for name, size in SIZES.items()}
    taken = dict.fromkeys(SIZES, 0)

    def rate(name: str) -> float:
        started = time.perf_counter()
        for _ in range(counts[name]):
            seen = first_column(next(iterators[name]))
            taken[name] += 1
        result = float(seen)
        elapsed = time.perf_counter() - started
        expected = np.arange((taken[name] - 1) * ROWS, taken[name] * ROWS, dtype=np.float32).sum()
        if result != expected:
            raise ArithmeticError(f"batch {taken[name]} has {result} in its first column, not {expected}")
        return counts[name] / elapsed

    def measure() -> dict[str, float]:
        return {name: rate(name) for name in SIZES}

    measure()
    return measure
