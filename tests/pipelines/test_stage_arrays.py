"""Tests of the shardings of arrays on the meshes of stages."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.errors import PipelineError
from atoll.pipelines.pipeline import pipeline
from atoll.pipelines.stage_arrays import (
    Batch,
    Parameters,
    batch_sharding,
    fitting_spec,
    moved_sharding,
    parameter_sharding,
)


@functools.cache
def device() -> jax.Device:
    return jax.devices()[0]


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array([device()]).reshape(1, 1), ("data", "model"))


def test_a_spec_fits_a_mesh_as_far_as_it_has_the_axes() -> None:
    assert fitting_spec(PartitionSpec("data", "expert"), (4, 4), mesh()) == PartitionSpec("data", None)
    assert moved_sharding(np.ones((2, 2)), mesh()).spec == PartitionSpec(None, None)
    sharded = jax.device_put(np.ones((2, 2)), NamedSharding(mesh(), PartitionSpec(None, "model")))
    assert moved_sharding(sharded, mesh()).spec == PartitionSpec(None, "model")


def test_a_spec_that_cannot_be_is_refused_with_the_name() -> None:
    with pytest.raises(PipelineError, match=r"has no axis 'expert': its axes are 'data', 'model'"):
        parameter_sharding(np.ones((4, 4)), PartitionSpec("expert"), mesh(), "params['w']")
    with pytest.raises(PipelineError, match=r"params\['w'\] has the shape \[4\], which .* cannot divide"):
        parameter_sharding(np.ones(4), PartitionSpec("data", "model"), mesh(), "params['w']")
    assert batch_sharding((), None, mesh(), "batch").spec == PartitionSpec()


def test_what_is_no_array_stays_in_the_tree_as_it_is() -> None:
    parameters = Parameters({"w": np.ones(3), "activation": jax.nn.gelu, "rate": 0.1}, None)
    assert parameters.names == ["params['w']"]
    tree = parameters.tree_of(["new"])
    assert tree == {"w": "new", "activation": jax.nn.gelu, "rate": 0.1}
    assert parameters.tree_of(["new"], fixed=False)["rate"] is None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.ones((6, 2))}, r"batch\['x'\] has 6 rows, which cannot be cut into 4"),
        ({"x": np.ones((8, 2)), "y": np.ones(4)}, "the same number of rows"),
        ({"x": "text"}, r"batch\['x'\] must be an array"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        Batch(batch, None, 4)


def test_a_batch_of_another_kind_than_the_first_is_refused() -> None:
    known = Batch({"x": np.ones((8, 2), np.float32)}, None, 4)
    with pytest.raises(PipelineError, match="call init again for a different kind of batch"):
        known.leaves_of({"x": np.ones((4, 2), np.float32)})
    with pytest.raises(PipelineError, match="with the structure"):
        known.leaves_of([np.ones((8, 2), np.float32)])


def test_a_pipeline_says_what_is_wrong_with_its_arguments() -> None:
    import optax

    with pytest.raises(PipelineError, match="at least one stage"):
        pipeline(lambda params, batch: 0.0, [], 2, optax.sgd(1.0))
    with pytest.raises(PipelineError, match="an optimizer must have init"):
        pipeline(lambda params, batch: 0.0, [device()], 2, None)
    with pytest.raises(PipelineError, match="call init"):
        pipeline(lambda params, batch: 0.0, [device()], 2, optax.sgd(1.0)).summary()
    with pytest.raises(PipelineError, match="must return a floating-point scalar"):
        pipeline(lambda params, batch: params, [device()], 2, optax.sgd(1.0)).init(np.ones(2), np.ones((2, 2)))
    with pytest.raises(PipelineError, match="no floating-point array to train"):
        pipeline(lambda params, batch: (params * batch).mean(), [device()], 2, optax.sgd(1.0)).init(
            np.ones(2, np.int32), np.ones((2, 2), np.float32)
        )
