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

BATCH = models.first_rows(4)


def train(trainings: Sequence[Any]) -> tuple[list[float], Any]:
    """Run one step of each of these trainings, moving the kept parameters between different ones.

    Return the losses, and the last state.
    """
    kept: Any = models.first_params(2)["layers"]
    losses, state, before = [], None, None
    for training in trainings:
        if training is not before:
            state, before = training.place(kept), training
        state, loss = training.step(state, BATCH)
        kept = jax.tree.map(lambda leaf: leaf.copy(), training.keep(state))
        losses.append(float(loss))
    return losses, state


@pytest.mark.thorough
def test_a_pipeline_goes_on_over_fewer_and_more_islands_with_the_same_bits() -> None:
    islands = [Mesh(np.array([device], object), ("data",)) for device in jax.devices()[:3]]
    make = pipeline(models.loss_of_rows, BATCH, stages=2, microbatches=2, optimizer=optax.adam(1e-2))
    two, one, others = (make(some) for some in (islands[:2], islands[:1], islands[1:]))
    wanted, _ = train([two] * 4)
    losses, state = train([two, one, others, others])
    assert losses == wanted
    assert [{leaf.device for leaf in parameters} for parameters in state.parameters] == [
        {mesh.devices.item()} for mesh in islands[1:]
    ]
