"""Tests of data-parallel replicas of a pipeline on stock JAX's devices: they share a batch and have the same
parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from atoll.errors import PipelineError
from atoll.pipelines.pipeline import Pipeline, pipeline
from tests.pipelines import models
from tests.pipelines.test_steps_on_stock import devices, losses_of, plain

pytestmark = pytest.mark.slow

ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
BATCH = models.first_rows(8)


def first_layers() -> Any:
    return models.first_params(2)["layers"]


@pytest.fixture(scope="module")
def trained() -> tuple[Pipeline, Any, list[float]]:
    """Train two replicas of two stages. Return their state and losses after two steps."""
    pipe = pipeline(models.loss_of_rows, list(devices()), 2, ADAM, replicas=2, donate=False)
    state, losses = pipe.init(first_layers(), BATCH), []
    for _ in range(2):
        state, loss = pipe.step(state, BATCH)
        losses.append(float(loss))
    return pipe, state, losses


@pytest.fixture(scope="module")
def wanted() -> tuple[list[float], Any]:
    return plain(models.loss_of_rows, ADAM, first_layers(), [BATCH] * 2)


def test_losses_and_parameters_are_those_of_plain_jax(trained: Any, wanted: Any) -> None:
    pipe, state, losses = trained
    assert losses == pytest.approx(wanted[0], rel=1e-5)
    for one, other in zip(jax.tree.leaves(pipe.params(state)), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_all_replicas_have_the_same_bits(trained: Any) -> None:
    _, state, _ = trained
    for stage in range(2):
        mine, others = state.parameters[stage], state.parameters[2 + stage]
        assert {each.device for each in (*mine, *others)} == {devices()[stage], devices()[2 + stage]}
        for one, other in zip(mine, others, strict=True):
            np.testing.assert_array_equal(one, other)


def test_replicas_share_the_optimizers_state(trained: Any) -> None:
    pipe, state, _ = trained
    moments = [sum(leaf.nbytes for leaf in leaves if leaf.ndim) for leaves in state.optimizer]
    assert sum(moments) == 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(pipe.params(state)))
    assert min(moments) > 0.3 * max(moments)


@pytest.mark.thorough
def test_a_batch_on_a_device_is_as_good_as_one_of_numpy(trained: Any) -> None:
    pipe, state, _ = trained
    _, loss = pipe.step(state, BATCH)
    _, same = pipe.step(state, jax.device_put(BATCH, devices()[3]))
    assert float(loss) == float(same)


@pytest.mark.thorough
def test_replicas_may_be_of_different_sizes_and_one_micro_batch(wanted: Any) -> None:
    stages = [devices()[0], Mesh(devices()[2:], ("data",))]
    losses, _ = losses_of(pipeline(models.loss_of_rows, stages, 1, ADAM, replicas=2), first_layers(), [BATCH] * 2)
    assert losses == pytest.approx(wanted[0], rel=1e-5)


@pytest.mark.parametrize(
    ("replicas", "stages", "rows", "text"),
    [
        (3, [0, 1, 2, 3], 8, "4 stages cannot be divided among 3 replicas"),
        (0, [0, 1], 8, "2 stages cannot be divided among 0 replicas"),
        (2, [0, 1, 2, 0], 8, "replicas 0 and 1 both use"),
        (2, [0, 1, 2, 3], 6, "has 6 rows, which cannot be cut into 2 replicas of 2 micro-batches"),
    ],
)
def test_what_cannot_be_is_refused_by_name(replicas: int, stages: list[int], rows: int, text: str) -> None:
    def train() -> None:
        pipe = pipeline(models.loss_of_rows, list(devices()[stages]), 2, ADAM, replicas=replicas)
        pipe.init(first_layers(), models.first_rows(rows))

    with pytest.raises(PipelineError, match=text):
        train()


@pytest.mark.parametrize("stages", [2, devices])
def test_stages_that_are_no_list_are_refused_by_value(stages: Any) -> None:
    with pytest.raises(PipelineError, match=r"stages is .*: expected a list"):
        pipeline(models.loss_of_rows, stages, 2, ADAM)
