"""Tests of elastic pipelines on stock JAX's devices, each of which represents an island."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from atoll.elastic.elastic_stages import pipeline
from tests.pipelines import models

pytestmark = pytest.mark.slow

BATCH = models.first_batch(4)


def train(steps: Sequence[Sequence[Mesh]]) -> tuple[list[float], Any]:
    """Run one training step on each of these lists of islands, moving the kept parameters between lists.

    Return the losses, and the last state.
    """
    make = pipeline(models.loss, BATCH, stages=2, microbatches=2, optimizer=optax.adam(1e-2))
    kept: Any = models.first_params(2)
    losses, state, training, before = [], None, make(steps[0]), None
    for islands in steps:
        if islands is not before:
            training = training if before is None else make(islands)
            state, before = training.place(kept), islands
        state, loss = training.step(state, BATCH)
        kept = jax.tree.map(lambda leaf: leaf.copy(), training.keep(state))
        losses.append(float(loss))
    return losses, state


def test_a_pipeline_goes_on_over_fewer_and_more_islands_with_the_same_bits() -> None:
    islands = [Mesh(np.array([device], object), ("data",)) for device in jax.devices()[:3]]
    two, one, others = islands[:2], islands[:1], islands[1:]
    wanted, _ = train([two] * 4)
    losses, state = train([two, one, others, others])
    assert losses == wanted
    assert [{leaf.device for leaf in parameters} for parameters in state.parameters] == [
        {mesh.devices.item()} for mesh in others
    ]
