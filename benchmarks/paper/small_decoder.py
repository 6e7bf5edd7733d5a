"""Table 2 and training over two islands on real devices: a small decoder, whose loss function is the same everywhere.

A pass backward computes the forward one again, layer by layer, as the paper's decoders do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll
from benchmarks.harness.benchmark import Round, Settings
from benchmarks.paper.table2 import REAL_PIPELINES
from examples.pipeline import Config, batches, block, first_params, normalized

FULL = Config(width=128, layers=8, heads=4, seq=64, batch=64)
QUICK = replace(FULL, width=32, layers=4, seq=16)
STEPS, QUICK_STEPS = 3, 2
WARM_UP = 2
OPTIMIZER = optax.adam(1e-3)

Batch = dict[str, Any]
Step = Callable[[Any, Batch], tuple[Any, Any]]  # (state, batch) -> (state, its loss, or losses whose mean it is)
WHOLE, ROWS = PartitionSpec(), PartitionSpec("data")


def prepare_table2(settings: Settings) -> Round:
    """As one SPMD computation on all devices, or as a pipeline of so many stages on as many of them each."""
    config = QUICK if settings.quick else FULL
    devices = jax.devices()
    stages, micro_batches = REAL_PIPELINES.get(settings.backend, (1, 1))
    if stages == 1:
        return _training(settings, config, *spmd(config, devices))
    each = len(devices) // stages
    meshes = [_mesh(devices[stage * each : (stage + 1) * each]) for stage in range(stages)]
    pipe = atoll.pipeline(partial(loss_of, config), meshes, micro_batches, OPTIMIZER, "gpipe")
    state = pipe.init(first_params(config), next(iter(data(config, 1))))
    arrays = [len(parameters) for parameters in state.parameters]
    alike = config.layers // stages * len(first_params(config)["blocks"][0])
    if arrays != [alike + 2, *[alike] * (stages - 2), alike + 1]:  # the embeddings and the head are added to the layers
        raise AssertionError(f"the stages have {arrays} parameters")
    return _training(settings, config, state, pipe.step)


def prepare_two_islands(settings: Settings) -> Round:
    """Data-parallel over the devices of one island, or of two, which send one another their gradients."""
    config = QUICK if settings.quick else FULL
    islands: dict[int, list[Any]] = {}
    for device in jax.devices():
        islands.setdefault(device.slice_index, []).append(device)
    if len(islands) == 1:
        return _training(settings, config, *spmd(config, jax.devices()))
    return _training(settings, config, *over_islands(config, list(islands.values())))


def loss_of(config: Config, params: Any, batch: Batch) -> Any:
    """Mean cross entropy of the next bytes, in nats."""
    x = params["tokens"][batch["tokens"]] + params["positions"]
    again = jax.checkpoint(partial(block, heads=config.heads))
    for number, each in enumerate(params["blocks"]):
        x = again(each, atoll.stage_boundary(x) if number else x)
    logits = normalized(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def data(config: Config, steps: int) -> list[Batch]:
    return [{"tokens": tokens, "targets": targets} for tokens, targets in batches(config, steps)]


def spmd(config: Config, devices: Sequence[Any]) -> tuple[Any, Step]:
    """The first state, and a step as one computation, data-parallel over the devices."""
    mesh = _mesh(devices)
    whole, rows = NamedSharding(mesh, WHOLE), NamedSharding(mesh, ROWS)

    def step(state: Any, batch: Batch) -> Any:
        params, moments = state
        loss, gradients = jax.value_and_grad(partial(loss_of, config))(params, batch)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    jitted = jax.jit(step, in_shardings=(whole, rows), out_shardings=whole, donate_argnums=0)
    return _first(config, whole), lambda state, batch: jitted(state, jax.device_put(batch, rows))


def over_islands(config: Config, islands: Sequence[Sequence[Any]]) -> tuple[Any, Step]:
    """A step as one program: each island sums its gradients, each of its devices sends its part of the sum to its
    partner in the other island, and each island applies the sum of both."""
    meshes = [_mesh(devices) for devices in islands]
    whole, rows = ([NamedSharding(mesh, spec) for mesh in meshes] for spec in (WHOLE, ROWS))
    flat, unflattened = ravel_pytree(first_params(config))
    padding = -flat.size % len(islands[0])

    def gradients(state: Any, batch: Batch) -> Any:
        loss, found = jax.value_and_grad(partial(loss_of, config))(state[0], batch)
        return loss, jnp.pad(ravel_pytree(found)[0], (0, padding))

    def updated(state: Any, mine: Any, other: Any) -> Any:
        params, moments = state
        mean = unflattened((mine + other)[: flat.size] / 2)
        updates, moments = OPTIMIZER.update(mean, moments, params)
        return optax.apply_updates(params, updates), moments

    compute = [jax.jit(gradients, in_shardings=each, out_shardings=each) for each in zip(whole, rows, strict=True)]
    apply = [
        jax.jit(updated, in_shardings=(w, r, r), out_shardings=w, donate_argnums=0)
        for w, r in zip(whole, rows, strict=True)
    ]

    def exchange(states: list[Any], halves: list[Batch]) -> Any:
        losses, sums = zip(*[compute[i](states[i], halves[i]) for i in range(2)], strict=True)
        received = [jax.device_put(sums[1 - i], rows[i]) for i in range(2)]
        return [apply[i](states[i], sums[i], received[i]) for i in range(2)], losses

    program = atoll.program(exchange, donate_argnums=0)

    def step(states: list[Any], batch: Batch) -> Any:
        halves = [jax.tree.map(lambda each, i=i: np.split(each, 2)[i], batch) for i in range(2)]
        return program(states, [jax.device_put(half, each) for half, each in zip(halves, rows, strict=True)])

    return [_first(config, each) for each in whole], step


def _mesh(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices), ("data",))


def _first(config: Config, sharding: Any) -> Any:
    params = first_params(config)
    return jax.device_put((params, OPTIMIZER.init(params)), sharding)


def _training(settings: Settings, config: Config, state: Any, step: Step) -> Round:
    """Every round trains on, on the same batches in all contestants: their losses are compared."""
    steps = settings.size(STEPS, QUICK_STEPS)
    given = iter(data(config, WARM_UP + 64 * steps))

    def train(count: int) -> float:
        nonlocal state
        losses = None
        for _ in range(count):
            state, losses = step(state, next(given))
        return float(np.mean([np.asarray(each) for each in jax.tree.leaves(losses)]))

    train(WARM_UP)  # compiles, and lets the scheduler see how long gangs take

    def measure() -> dict[str, float]:
        started = time.perf_counter()
        loss = train(steps)
        seconds = (time.perf_counter() - started) / steps
        return {"tokens": config.batch * config.seq / seconds, "step": seconds, "loss": loss}

    return measure
