"""A model whose layers sleep, in the schedules of `atoll.pipeline` and as one SPMD computation, on real devices.

Order and messages count, and no core has to compute. A row takes a layer so long forward, twice as long backward.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness.benchmark import Round, Settings

SPMD = "spmd"
STAGES = 4
LAYERS = 8  # of the model: two a stage, or one for each of a stage's two interleaved parts
STAGE_SECONDS = 0.02  # of a micro-batch forward, and of each half of backward
ROWS = STAGES  # of a micro-batch: SPMD cuts a batch by the devices
WIDTH = 16
_STEPS, _QUICK_STEPS = 4, 2


def contestant(name: str) -> str:
    return f"Atoll, {name}"


def compared(step: float, table: float, busy: float) -> dict[str, float]:
    """A step's seconds, with what the table says and for how long each device computes."""
    return {"step": step, "table": table, "more": 100 * (step / table - 1), "bubble": 100 * (1 - busy / step)}


def tell_workers() -> None:
    """Let workers, which the first use of JAX starts, know the custom call."""
    root = Path(__file__).parents[2]
    paths = (str(root / "benchmarks" / "elastic" / "site"), os.environ.get("PYTHONPATH", str(root)))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def prepare(settings: Settings) -> Round:
    tell_workers()
    microbatches = int(settings.point["microbatches"])
    name = settings.backend.removeprefix(contestant(""))
    seconds = STAGE_SECONDS * 3 * microbatches  # of a device, without any bubble
    if name == SPMD:
        step, ideal = _spmd(microbatches), seconds
    else:
        pipeline = Pipeline(name, microbatches)
        step, ideal = pipeline.run, pipeline.table.check(pipeline.times).length
    step(3)  # compiles, and lets the scheduler see how long gangs take
    steps = settings.size(_STEPS, _QUICK_STEPS)

    def measure() -> dict[str, float]:
        started = time.perf_counter()
        step(steps)
        each = (time.perf_counter() - started) / steps
        return compared(each, ideal, seconds)

    return measure


class Pipeline:
    """The model in the schedule of that name, over the first devices; a stage's times are `times`, in seconds."""

    def __init__(self, name: str, microbatches: int) -> None:
        import jax
        import numpy as np
        import optax

        import atoll
        from atoll.pipelines.entries import Times

        self.table = atoll.schedule(name, STAGES, microbatches)
        part = STAGE_SECONDS * STAGES / self.table.parts
        self.times = Times(part, 2 * part, part, part)
        devices = sorted(jax.devices(), key=lambda device: device.slice_index)
        self._pipe = atoll.pipeline(_loss, devices[:STAGES], microbatches, optax.sgd(1e-3), self.table)
        self._batch = np.ones((ROWS * microbatches, WIDTH), np.float32)
        self._state = self._pipe.init(first_weights(), self._batch)
        layers = [len(parameters) for parameters in self._state.parameters]
        if layers != [LAYERS // STAGES] * STAGES:
            raise AssertionError(f"the stages have {layers} layers")

    def run(self, steps: int) -> None:
        """Run so many steps, one after another, and wait for the loss of the last one."""
        loss = None
        for _ in range(steps):
            self._state, loss = self._pipe.step(self._state, self._batch)
        check(loss)

    def wait(self) -> None:
        """Wait until the last step's weights are also complete."""
        import jax

        jax.block_until_ready(self._state)


def _spmd(microbatches: int) -> Any:
    """The same model, each device with all of its layers and its share of the rows."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:STAGES]), ("data",))
    whole, rows = PartitionSpec(), PartitionSpec("data")

    def gradients(weights: Any, batch: Any) -> Any:
        found = jax.value_and_grad(lambda weights: _loss(weights, batch, in_one=True))(weights)
        return jax.tree.map(lambda each: jax.lax.pmean(each, "data"), found)

    over = jax.shard_map(gradients, mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=False)

    def updated(weights: Any, batch: Any) -> Any:
        loss, found = over(weights, batch)
        return [weight - 1e-3 * each for weight, each in zip(weights, found, strict=True)], loss

    update = jax.jit(updated)
    weights = jax.device_put(first_weights(), NamedSharding(mesh, whole))
    batch = jax.device_put(np.ones((ROWS * microbatches, WIDTH), np.float32), NamedSharding(mesh, rows))

    def step(count: int) -> None:
        nonlocal weights
        loss = None
        for _ in range(count):
            weights, loss = update(weights, batch)
        check(loss)

    return step


def check(loss: Any) -> None:
    """Waits for it. Weights and rows begin as ones, so the loss does, and each step of training lowers it a little."""
    if not 0.1 < float(loss) < 1.01:
        raise AssertionError(f"the loss is {float(loss)}")


def first_weights() -> list[Any]:
    import numpy as np

    return [np.eye(WIDTH, dtype=np.float32) for _ in range(LAYERS)]


def _loss(weights: Any, batch: Any, in_one: bool = False) -> Any:
    """Return the loss. With `in_one`, gradients are passed to the next layer when those of the weights are also
    complete, so that a device only sleeps for one thing at a time.
    """
    import atoll

    x = batch
    for number, weight in enumerate(weights):
        x = layer(in_one)(weight, atoll.stage_boundary(x) if number else x)
    return (x**2).mean()


@cache
def layer(in_one: bool) -> Any:
    import jax

    from benchmarks.elastic import sleeping

    def slept(x: Any) -> Any:
        seconds = x.shape[0] * STAGE_SECONDS * STAGES / LAYERS / ROWS
        return x.at[0, 0].set(sleeping.after(x[0, 0], seconds))

    def plain(weight: Any, x: Any) -> Any:
        return slept(x @ weight)

    def forward(weight: Any, x: Any) -> Any:
        return slept(x @ weight), (weight, x)

    def backward(kept: Any, gradient: Any) -> Any:
        weight, x = kept
        of_input = slept(gradient @ weight.T)
        # Behind that of the input, as what both are made of comes from there.
        gradient = slept(gradient.at[0, 1].add(0 * of_input[0, 0]))
        of_weight = x.T @ gradient
        return of_weight, of_input.at[0, 0].add(0 * of_weight[0, 0]) if in_one else of_input

    layer = jax.custom_vjp(plain)
    layer.defvjp(forward, backward)
    return layer
