"""The honest tenant: a small data-parallel training that repeats the same epoch and compares every result.

Prints one line of JSON per second with the number of steps so far. Ends with status 3 at a wrong value, and with an
exception if an array is lost.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WRONG = 3
_EPOCH = 50  # steps
_IN_FLIGHT = 8
_WIDTH, _BATCH, _LAYERS = 256, 256, 4
_HELD = 8  # arrays that live as long as the training


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, parts = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    rng = np.random.default_rng(0)
    first = [rng.normal(size=(_WIDTH, _WIDTH)).astype(np.float32) / _WIDTH**0.5 for _ in range(_LAYERS)]
    batch = jax.device_put(rng.normal(size=(_BATCH, _WIDTH)).astype(np.float32), parts)
    contents = [rng.normal(size=(1 << 16,)).astype(np.float32) for _ in range(_HELD)]
    held = [jax.device_put(each, parts) for each in contents]

    def loss(weights: list[Any], x: Any) -> Any:
        y = x
        for each in weights:
            y = jnp.tanh(y @ each)
        return jnp.mean((y - x) ** 2)

    def train(weights: list[Any], x: Any) -> tuple[list[Any], Any]:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    step = jax.jit(train)

    expected: list[float] | None = None
    steps, output = 0, time.monotonic()
    print(json.dumps({"at": output, "steps": 0}), flush=True)
    while True:
        weights = jax.device_put(first, whole)
        losses: list[Any] = []
        flight: deque[Any] = deque()
        for _ in range(_EPOCH):
            weights, value = step(weights, batch)
            losses.append(value)
            flight.append(value)
            if len(flight) > _IN_FLIGHT:
                flight.popleft().block_until_ready()
                steps += 1
            if time.monotonic() - output >= 1:
                output = time.monotonic()
                print(json.dumps({"at": output, "steps": steps}), flush=True)
        found = [float(each) for each in losses]
        steps += len(flight)
        if expected is None:
            expected = found
        if found != expected:
            print(json.dumps({"wrong": "losses", "found": found, "expected": expected}), flush=True)
            sys.exit(WRONG)
        for number, (array, content) in enumerate(zip(held, contents, strict=True)):
            if not np.array_equal(np.asarray(array), content):
                print(json.dumps({"wrong": f"held array {number}"}), flush=True)
                sys.exit(WRONG)


if __name__ == "__main__":
    main()
