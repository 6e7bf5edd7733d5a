"""(v), (x): rows to experts on four islands and back, as a sparse exchange and as an all-to-all of the same capacity.

The rows are on the first island, and each goes to two of four experts, one on each island, at random. Capacity is four
times what an even load needs, so a quarter of it is used. Both are one program a step, and each step takes what the one
before has made.

To measure only the exchange, an expert reads one number of its block, and returns the block unchanged. Otherwise it
multiplies its whole block by a number, including places without a row, so that the work is the same in both.

(x) is only the exchange, between two machines, which are network namespaces (root) on a link of 1 Gbit/s: the first
island is on one, the three others on the other.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import atoll
from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.machines import OtherMachine, start_cluster, until_up

DENSE = ("atoll, all-to-all", "atoll, all-to-all, 2 machines")
LINK = "1gbit"
ISLANDS, CHOICES, WIDTH = 4, 2, 1024
# Rows, by their megabytes.
SIZES = {"1": 256, "4": 1024, "8": 2048, "16": 4096}


def capacity_of(rows: int) -> int:
    """Return the capacity of an expert: four times an even load."""
    return 4 * rows * CHOICES // ISLANDS


# The result of an expert, which shows that it had its block. Otherwise, unchanged blocks would not have to be sent.
Expert = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


_double = jax.jit(lambda block: (block * 2, block[0, 0]))
_first = jax.jit(lambda block: block[0, 0])


def doubled(block: jax.Array) -> tuple[jax.Array, jax.Array]:
    made, seen = _double(block)
    return made, seen


def looked_at(block: jax.Array) -> tuple[jax.Array, jax.Array]:
    return block, _first(block)


def sparse(devices: list[Any], capacity: int, expert: Expert) -> Any:
    @atoll.program
    def step(rows: jax.Array, chosen: jax.Array, weights: jax.Array) -> Any:
        blocks, routing = atoll.route(rows, chosen, to=devices, capacity=capacity)
        made, seen = zip(*map(expert, blocks), strict=True)
        return atoll.unroute(made, routing, weights), seen

    return step


def dense(devices: list[Any], capacity: int, expert: Expert) -> Any:
    """Send whole blocks to the experts and back, as arrays."""

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
        found = jnp.zeros((), np.float32)
        for of, place, weight in zip(chosen.T, rank.T, weights.T, strict=True):
            for number, block in enumerate(blocks):
                found += (
                    jnp.where((of == number)[:, None], block[jnp.where(of == number, place, 0)], 0) * weight[:, None]
                )
        return found

    there, back = jax.jit(spread), jax.jit(combined)

    @atoll.program
    def step(rows: jax.Array, chosen: jax.Array, weights: jax.Array) -> Any:
        blocks, rank = there(rows, chosen)
        given = [jax.device_put(block, device) for block, device in zip(blocks, devices, strict=True)]
        made, seen = zip(*map(expert, given), strict=True)
        return back([jax.device_put(each, devices[0]) for each in made], rank, chosen, weights), seen

    return step


def exchange(settings: Settings) -> Round:
    """Return the steps per second of the exchange only and with experts, by the megabytes of rows per step."""
    full = {"1": 64, "4": 24, "8": 12, "16": 6}
    repeats = {size: settings.size(full=times, quick=2) for size, times in full.items()}
    return _steps(settings, repeats, {"exchange": (looked_at, 1), "rate": (doubled, 2)})


def between_machines(settings: Settings) -> Round:
    """Return the steps per second of the exchange only, by the megabytes of rows per step."""
    machine = OtherMachine()
    machine.limit(LINK)
    start_cluster(machine, ISLANDS)
    until_up()
    repeats = {"1": settings.size(full=12, quick=2), "4": settings.size(full=6, quick=2)}
    return _steps(settings, repeats, {"exchange": (looked_at, 1)})


def _steps(settings: Settings, repeats: dict[str, int], experts: dict[str, tuple[Expert, int]]) -> Round:
    devices = jax.devices()
    assert len({device.slice_index for device in devices}) == ISLANDS
    make = dense if settings.system in DENSE else sparse
    rng = np.random.default_rng(0)
    steps = {}
    for size, times in repeats.items():
        count = SIZES[size]
        chosen = np.argsort(rng.random((count, ISLANDS)), 1)[:, :CHOICES].astype(np.int32)
        rows = rng.standard_normal((count, WIDTH)).astype(np.float32)
        for name, (expert, factor) in experts.items():
            weights = np.full((count, CHOICES), 1 / (factor * CHOICES), np.float32)  # so rows stay what they are
            given = jax.device_put((rows, chosen, weights), devices[0])
            steps[f"{name}_{size}"] = make(devices, capacity_of(count), expert), given, rows, times

    def measure() -> dict[str, float]:
        found = {}
        for name, (step, (rows, *others), expected, times) in steps.items():
            x = rows
            started = time.perf_counter()
            for _ in range(times):
                x, _ = step(x, *others)
            x.block_until_ready()
            found[name] = times / (time.perf_counter() - started)
            np.testing.assert_allclose(np.asarray(x)[::97], expected[::97], rtol=1e-5)
        return found

    measure()
    return measure
