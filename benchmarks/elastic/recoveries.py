"""The script of `python -m benchmarks recoveries`: runs of a deep model, each until it has continued after a loss.

Every second run compiles ahead. The runs have different constants, so no cache has their steps.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import atoll
from benchmarks.elastic import work

WIDTH, LAYERS, ROWS = 64, 6, 12
_STEPS = 30  # before an island may fail


def first_state() -> list[dict[str, Any]]:
    values = np.random.default_rng(0)
    return [
        {
            "in": values.normal(size=(WIDTH, 2 * WIDTH), scale=0.1),
            "out": values.normal(size=(2 * WIDTH, WIDTH), scale=0.1),
        }
        for _ in range(LAYERS)
    ]


def batch(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)


def training(constant: float) -> Any:
    def loss_of(state: list[dict[str, Any]], rows: jax.Array) -> jax.Array:
        for layer in state:
            rows = rows + jax.nn.gelu(rows @ layer["in"]) @ layer["out"]
            rows = (rows - rows.mean(axis=-1, keepdims=True)) / (rows.std(axis=-1, keepdims=True) + constant)
        return jnp.mean(rows**4)

    def gradients(state: Any, rows: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(state, rows)
        return gradient, loss

    def update(state: Any, gradient: Any) -> Any:
        return jax.tree.map(lambda leaf, change: leaf - 0.01 * change, state, gradient)

    return atoll.elastic.data_parallel(gradients, update)


def is_ready(run: Any, islands: int, ahead: int) -> bool:
    """Return whether the run is on all islands and, if it compiles ahead, has compiled for the loss of each."""
    without_each = [tuple(each for each in run.islands if each != lost) for lost in run.islands]
    return len(run.islands) == islands and (not ahead or set(without_each) <= set(run.compiled_ahead))


def main() -> None:
    runs, first = work.argument(1), work.argument(2)
    compilations: list[str] = []
    lock = threading.Lock()

    def count(event: str, seconds: float, **labels: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with lock:
                compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    islands = len({device.slice_index for device in jax.devices()})
    for number in range(runs):
        ahead = 8 * (number % 2)
        state = jax.tree.map(np.float32, first_state())
        run = atoll.elastic.run(
            training(1e-3 + 1e-6 * (first + number)),
            state,
            batch,
            steps=1 << 40,
            every=10,
            min_islands=islands - 1,  # so it does not compile for the next loss after this one
            compile_ahead=ahead,
        )
        before = None
        for step, _ in run:
            if before is None and step >= _STEPS and is_ready(run, islands, ahead):
                before = len(compilations)
                work.report("ready", run=number)
            lost = [each for each in run.changes if each.reason == "lost"]
            if lost:
                work.report(
                    "recovery",
                    run=number,
                    ahead=ahead,
                    seconds=lost[0].seconds,
                    compilations=len(compilations) - (before or 0),
                )
                break
        del run


if __name__ == "__main__":
    main()
