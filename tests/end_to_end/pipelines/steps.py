"""What children do with a pipeline; a module of its own, since they import it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import atoll as pw
from tests.end_to_end.pipelines import models


def islands() -> list[list[Any]]:
    found: dict[int, list[Any]] = {}
    for device in jax.devices():
        found.setdefault(device.slice_index, []).append(device)
    return [found[island] for island in sorted(found)]


def pipeline_losses(
    kind: str, stages: int, microbatches: int, schedule: str, steps: int, reset: bool = False
) -> list[float]:
    """Losses of a model's first steps over so many islands."""
    params, loss = models.MODELS[kind]()
    pipe = pw.pipeline(loss, islands()[:stages], microbatches, models.optimizer(), schedule)
    data = models.batches(steps)
    state = pipe.init(params, data[0])
    losses = []
    for batch in data:
        state, value = pipe.step(state, batch)
        losses.append(float(value))
    return losses


def parameters_come_back() -> tuple[bool, float, int]:
    """Whether the tree is the user's own; how far a step has changed it; how many islands its arrays are on."""
    params, loss = models.linen_model()
    pipe = pw.pipeline(loss, islands()[:2], 2, models.optimizer())
    batch = models.batches(1)[0]
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
