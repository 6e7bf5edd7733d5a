"""Functions that children call with a pipeline. Children import this module."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import atoll
from atoll.pipelines.picture import bars
from tests.end_to_end.pipelines import pipeline_models


def islands() -> list[list[Any]]:
    found: dict[int, list[Any]] = {}
    for device in jax.devices():
        found.setdefault(device.slice_index, []).append(device)
    return [found[island] for island in sorted(found)]


def pipeline_losses(
    kind: str, layers: int, stages: int, microbatches: int, schedule: str, steps: int, replicas: int = 1
) -> list[float]:
    """Return the losses of a model's first steps with this many islands per replica.

    All replicas have the same parameters.
    """
    params, loss = pipeline_models.MODELS[kind](layers)
    some = islands()[: replicas * stages]
    pipe = atoll.pipeline(loss, some, microbatches, pipeline_models.optimizer(), schedule, replicas=replicas)
    data = pipeline_models.batches(steps)
    state = pipe.init(params, data[0])
    losses = []
    for batch in data:
        state, value = pipe.step(state, batch)
        losses.append(float(value))
    for number, parameters in enumerate(state.parameters):
        for one, other in zip(state.parameters[number % stages], parameters, strict=True):
            np.testing.assert_array_equal(one, other)
    return losses


def parameters_come_back() -> tuple[bool, float, int]:
    """Check a tree after a step: whether it has the user's type, how much it has changed, and how many islands it is
    on.
    """
    params, loss = pipeline_models.plain_model(2)
    pipe = atoll.pipeline(loss, islands()[:2], 4, pipeline_models.optimizer(), "gpipe")
    batch = pipeline_models.batches(1)[0]
    state = pipe.init(params, batch)
    before = pipe.params(state)
    same = jax.tree.structure(before) == jax.tree.structure(params) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(params), strict=True)
    )
    state, _ = pipe.step(state, batch)
    after = pipe.params(state)
    changed = max(
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True)
    )
    used = {device.slice_index for leaf in jax.tree.leaves(after) for device in leaf.devices()}
    return same, changed, len(used)


def calls_of_a_step(stages: int, microbatches: int, replicas: int) -> list[tuple[int, str, int, int]]:
    """Return the calls of a step: island, program, time of the launch, and number of nodes."""
    params, loss = pipeline_models.plain_model(2)
    some = islands()[: stages * replicas]
    pipe = atoll.pipeline(loss, some, microbatches, pipeline_models.optimizer(), "gpipe", replicas=replicas)
    batch = pipeline_models.batches(1)[0]
    state = pipe.init(params, batch)
    state, _ = jax.block_until_ready(pipe.step(state, batch))
    with atoll.trace() as spans:
        jax.block_until_ready(pipe.step(state, batch))
    return [(span.island, span.program, span.launched, span.nodes) for span in spans if span.kind == "call"]


def entries_that_ran(stages: int, microbatches: int) -> tuple[list[str], list[str]]:
    """Return the entries of a step's table and those of its spans, both sorted."""
    params, loss = pipeline_models.plain_model(2)
    pipe = atoll.pipeline(loss, islands()[:stages], microbatches, pipeline_models.optimizer(), "gpipe")
    batch = pipeline_models.batches(1)[0]
    state = pipe.init(params, batch)
    state, _ = jax.block_until_ready(pipe.step(state, batch))
    with atoll.trace() as spans:
        jax.block_until_ready(pipe.step(state, batch))
    ran = [str(entry) for bar in bars(pipe.schedule.rows, spans) for entry in bar.entries]
    return sorted(str(entry) for row in pipe.schedule.rows for entry in row), sorted(ran)
