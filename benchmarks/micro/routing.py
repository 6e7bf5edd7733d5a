"""(v): rows to experts on four islands and back, as a sparse exchange and as an all-to-all of the same capacity.

The rows are on the first island, and each goes to two of four experts, one on each island, at random. Capacity is four
times what an even load needs, so a quarter of it is used. An expert multiplies all of its block by a number. Both are
one program a step, and each step takes what the one before has made.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import atoll
from benchmarks.harness.benchmark import Round, Settings

DENSE = "atoll, all-to-all"
ISLANDS, CHOICES, WIDTH = 4, 2, 1024
# Rows, by their megabytes.
SIZES = {"1": 256, "4": 1024, "16": 4096}


def capacity_of(rows: int) -> int:
    """Of an expert: four times an even load."""
    return 4 * rows * CHOICES // ISLANDS


expert = jax.jit(lambda block: block * 2)


def sparse(devices: list[Any], capacity: int) -> Any:
    @atoll.program
    def step(rows: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        blocks, routing = atoll.route(rows, chosen, to=devices, capacity=capacity)
        found: jax.Array = atoll.unroute([expert(block) for block in blocks], routing, weights)
        return found

    return step


def dense(devices: list[Any], capacity: int) -> Any:
    """The blocks go and come back whole, as arrays do."""

    def spread(rows: jax.Array, chosen: jax.Array) -> Any:
        flat = chosen.T.reshape(-1)
        by_expert = jnp.argsort(flat, stable=True)
        sizes = jnp.zeros(ISLANDS, np.int32).at[flat].add(1)
        first = jnp.cumsum(sizes) - sizes
        rank = jnp.zeros(flat.size, np.int32).at[by_expert].set(jnp.arange(flat.size) - first[flat[by_expert]])
        places = np.arange(capacity)
        blocks = []
        for number in range(ISLANDS):
            origin = by_expert[jnp.minimum(first[number] + places, flat.size - 1)] % rows.shape[0]
            blocks.append(jnp.where((places < sizes[number])[:, None], rows[origin], 0))
        return blocks, rank.reshape(CHOICES, -1).T

    def combined(blocks: list[jax.Array], rank: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        found = sum(
            jnp.where((chosen == number)[..., None], block[jnp.where(chosen == number, rank, 0)], 0)
            for number, block in enumerate(blocks)
        )
        return (found * weights[..., None]).sum(1)

    there, back = jax.jit(spread), jax.jit(combined)

    @atoll.program
    def step(rows: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        blocks, rank = there(rows, chosen)
        made = [expert(jax.device_put(block, device)) for block, device in zip(blocks, devices, strict=True)]
        found: jax.Array = back([jax.device_put(each, devices[0]) for each in made], rank, chosen, weights)
        return found

    return step


def exchange(settings: Settings) -> Round:
    """Steps a second, by the megabytes that the rows of a step are."""
    devices = jax.devices()
    assert len({device.slice_index for device in devices}) == ISLANDS
    make = dense if settings.system == DENSE else sparse
    repeats = {"1": settings.size(full=64, quick=4), "4": settings.size(full=24, quick=2), "16": settings.size(6, 2)}
    rng = np.random.default_rng(0)
    steps = {}
    for size, count in SIZES.items():
        chosen = np.argsort(rng.random((count, ISLANDS)), 1)[:, :CHOICES].astype(np.int32)
        weights = np.full((count, CHOICES), 0.25, np.float32)  # so rows stay what they are
        rows = rng.standard_normal((count, WIDTH)).astype(np.float32)
        given = jax.device_put((rows, chosen, weights), devices[0])
        steps[size] = make(devices, capacity_of(count)), given, rows

    def measure() -> dict[str, float]:
        found = {}
        for size, (step, (rows, *others), expected) in steps.items():
            x = rows
            started = time.perf_counter()
            for _ in range(repeats[size]):
                x = step(x, *others)
            x.block_until_ready()
            found[f"rate_{size}"] = repeats[size] / (time.perf_counter() - started)
            np.testing.assert_allclose(np.asarray(x)[::97], expected[::97], rtol=1e-5)
        return found

    measure()
    return measure
