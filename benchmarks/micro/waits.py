"""(z): how long a script waits for a value, an array or a new function, one operation at a time.

Each operation handles new arrays, since JAX keeps the host's copy of an array that was read once. Inputs are made
before the clock starts, and results are checked after it stops. CPU time is that of all processes of the contestant.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.harness.cpu import cpu_seconds

TREE = 100  # arrays of 4 B
# Each process begins with a different number, because compiled programs are cached on disk. float32 has all of them.
FIRST = (1 << 16, 1 << 23)
EAGER = 50  # additions in a row
WIDTH, VOCABULARY = 64, 256  # of the decoder


@dataclass(frozen=True)
class Operation:
    """An operation: how to make an input from a number, perform the operation, and compute the expected number.

    `performed` is how many operations one `run` performs.
    """

    make: Callable[[int], Any]
    run: Callable[[Any], Any]
    expected: Callable[[int], float]
    performed: int = 1
    few: bool = False


def waits(settings: Settings) -> Round:
    """Measure the median time of each operation, and its mean CPU time under its name with `_cpu`, in ms."""
    return round_of(operations(), settings.size(full=60, quick=10), settings.size(full=10, quick=3))


def round_of(performed: Mapping[str, Operation], many: int, few: int) -> Round:
    """Return a round that measures each operation as often as `many` or, if it is one of `few`, `few` says.

    It returns the median time of each, and its mean CPU time under its name with `_cpu`, in ms.
    """
    numbers = itertools.count(random.randrange(*FIRST))

    def measure() -> dict[str, float]:
        found: dict[str, float] = {}
        for name, operation in performed.items():
            used = list(itertools.islice(numbers, few if operation.few else many))
            seconds, cpu = measured(operation, used)
            found |= {name: 1e3 * seconds, f"{name}_cpu": 1e3 * cpu}
        return found

    measure()
    return measure


def measured(operation: Operation, numbers: Sequence[int]) -> tuple[float, float]:
    """Return the median time and the mean CPU time of an operation in seconds, over operations on these numbers."""
    inputs = [operation.make(number) for number in numbers]
    durations, results = [], []
    before = sum(cpu_seconds().values())
    for each in inputs:
        started = time.perf_counter()
        results.append(operation.run(each))
        durations.append(time.perf_counter() - started)
    cpu = sum(cpu_seconds().values()) - before
    for number, result in zip(numbers, results, strict=True):
        np.testing.assert_array_equal(np.asarray(result), operation.expected(number))
    return statistics.median(durations) / operation.performed, cpu / len(inputs) / operation.performed


def operations() -> dict[str, Operation]:
    """Return the operations on the first device, by name."""
    device = jax.devices()[0]
    add_one = jax.jit(lambda x: x + 1)

    def put(number: int) -> jax.Array:
        return jax.device_put(np.float32(number), device)

    def ready(number: int) -> jax.Array:
        return put(number).block_until_ready()

    def add_eagerly(x: jax.Array) -> jax.Array:
        for _ in range(EAGER):
            x = x + x
            x = x / 2
        return x.block_until_ready()

    def new_function(number: int) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
        # The number is part of the computation: no cache has it.
        return jax.jit(lambda x: jnp.sin(x) * 0 + number), ready(0)

    weights = jax.device_put(np.eye(WIDTH, VOCABULARY, dtype=np.float32) + 0.01, device)

    def step(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the next state, and the token."""
        return state + 1, jnp.argmax(jnp.roll(state, 1) @ weights) * 0 + state[0].astype(int) % VOCABULARY

    decode = jax.jit(step)

    def read_token(state: jax.Array) -> int:
        _, token = decode(state)
        return int(token)

    def same(number: int) -> float:
        return number

    def one_more(number: int) -> float:
        return number + 1

    return {
        "read": Operation(lambda number: add_one(put(number)).block_until_ready(), np.asarray, one_more),
        "read_launched": Operation(lambda number: add_one(put(number)), np.asarray, one_more),
        "put": Operation(np.float32, lambda value: jax.device_put(value, device).block_until_ready(), same),
        "call": Operation(ready, lambda x: add_one(x).block_until_ready(), one_more),
        "call_float": Operation(ready, lambda x: float(add_one(x)), one_more),
        "eager": Operation(ready, lambda x: (x + x).block_until_ready(), lambda number: 2 * number),
        "eager_in_a_row": Operation(ready, add_eagerly, same, performed=2 * EAGER, few=True),
        "any": Operation(ready, lambda x: bool(jnp.any(x)), lambda number: True),
        "decode": Operation(
            lambda number: jax.device_put(np.full(WIDTH, number % VOCABULARY, np.float32), device).block_until_ready(),
            read_token,
            lambda number: number % VOCABULARY,
        ),
        "jit": Operation(new_function, lambda made: made[0](made[1]).block_until_ready(), same, few=True),
        "get_tree": Operation(
            lambda number: [add_one(put(number)).block_until_ready() for _ in range(TREE)],
            lambda arrays: np.unique(jax.device_get(arrays)),
            one_more,
            few=True,
        ),
        "put_tree": Operation(
            lambda number: [np.float32(number)] * TREE,
            lambda tree: jax.block_until_ready(jax.device_put(tree, device))[-1],
            same,
            few=True,
        ),
    }
