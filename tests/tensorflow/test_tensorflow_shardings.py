"""Tests of how variables are sharded: by their names, like the variables that they were made for, or not at all."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

tf = pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from atoll.tensorflow import tensorflow_shardings  # noqa: E402


def variable(name: str, *shape: int) -> tf.Variable:
    return tf.Variable(np.zeros(shape, np.float32), name=name)


NAMES = {
    "block/dense/kernel": (4, 8),
    "block/dense/bias": (8,),
    "adam/block_dense_kernel_momentum": (4, 8),
    "adam/block_dense_bias_velocity": (8,),
    "adam/iteration": (),
}


def test_the_first_expression_that_is_found_in_a_name_counts_and_slots_follow_their_variables(square: Mesh):
    variables = [variable(name, *shape) for name, shape in NAMES.items()]
    rule = {"dense/kernel": P(None, "model"), "dense/": P("data")}
    found = tensorflow_shardings.variable_specs(variables, rule, square)
    assert dict(zip(NAMES, found, strict=True)) == {
        "block/dense/kernel": P(None, "model"),
        "block/dense/bias": P("data"),
        "adam/block_dense_kernel_momentum": P(None, "model"),
        "adam/block_dense_bias_velocity": P("data"),
        "adam/iteration": P(),
    }


def test_a_rule_may_be_a_function_of_the_variable(square: Mesh):
    variables = [variable("a", 4, 4), variable("b", 4)]
    found = tensorflow_shardings.variable_specs(
        variables, lambda each: P("model") if len(each.shape) > 1 else None, square
    )
    assert found == [P("model"), P()]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("data", None, None), r"the variable 'kernel' has the shape \(4, 3\), but .* names 3 axes"),
        (P("rows"), r"names the axis 'rows', but the mesh has \('data', 'model'\)"),
        (P(None, "model"), r"its axis 1 cannot be cut into 2 equal parts"),
        (P(("data", "model"), "model"), r"its axis 1 cannot be cut into 2 equal parts"),
    ],
)
def test_a_spec_that_does_not_fit_names_the_variable_and_why(square: Mesh, spec: P, message: str):
    with pytest.raises(ValueError, match=message):
        tensorflow_shardings.variable_specs([variable("kernel", 4, 3)], {"kernel": spec}, square)


def test_what_is_no_partition_spec_is_refused(square: Mesh):
    with pytest.raises(TypeError, match=r"must be a jax.sharding.PartitionSpec"):
        tensorflow_shardings.variable_specs([variable("kernel", 4, 4)], {"kernel": "model"}, square)


def test_devices_of_several_islands_need_a_mesh(monkeypatch: pytest.MonkeyPatch):
    devices = [SimpleNamespace(slice_index=number) for number in (0, 0, 1, 1)]
    monkeypatch.setattr(tensorflow_shardings.jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match="the 4 devices are on 2 islands"):
        tensorflow_shardings.default_mesh()
