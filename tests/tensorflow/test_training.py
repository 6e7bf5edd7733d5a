"""Tests that training on a mesh equals TensorFlow's own within float tolerance: losses, weights, statistics, slots,
seeds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

tf = pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

import keras  # noqa: E402

from atoll import tensorflow as atf  # noqa: E402

STEPS = 4


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(16, 8)).astype("f4"), rng.normal(size=(16, 2)).astype("f4")) for _ in range(STEPS)]


def classifier() -> keras.Model:
    """With all kinds of state: weights, batch statistics, and the seed of a dropout."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16, use_bias=False, name="first"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Dropout(0.5, seed=1, name="dropout"),
            layers.Dense(2, name="last"),
        ]
    )


def training() -> tuple[Callable[..., Any], list[Any]]:
    """Run a training step. Return all variables after its first call."""
    model, optimizer = classifier(), keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-2, 10))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    return step, [model, optimizer]


def values(owners: list[Any]) -> list[np.ndarray]:
    return [np.asarray(each.value) for owner in owners for each in owner.variables]


@functools.cache
def expected() -> tuple[list[float], list[np.ndarray]]:
    """Return the results of TensorFlow, also compiled by XLA, since its dropout draws other numbers otherwise."""
    step, owners = training()
    compiled = tf.function(step, jit_compile=True)
    return [float(compiled(*batch)) for batch in batches()], values(owners)


@pytest.mark.parametrize(
    "cut", [*(pytest.param(each, marks=pytest.mark.thorough) for each in ("data", "model")), "both"]
)
def test_a_step_of_training_gives_the_losses_weights_and_slots_of_tensorflow(mesh: Mesh, square: Mesh, cut: str):
    rule = None if cut == "data" else {"first/kernel": P(None, "model"), "last/kernel": P("model", None)}
    step, owners = training()
    on_mesh = atf.function(
        step, mesh=mesh if cut == "data" else square, shardings=rule, batch=P() if cut == "model" else None
    )
    losses = [float(on_mesh(*batch)) for batch in batches()]
    on_mesh.write_back()
    their_losses, their_values = expected()
    np.testing.assert_allclose(losses, their_losses, rtol=1e-5)
    for ours, theirs in zip(values(owners), their_values, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    if rule:
        slots = [each for name, each in on_mesh.variables.items() if "first_kernel" in name]
        assert [each.sharding.spec for each in slots] == [P(None, "model")] * 2


def test_a_keras_model_is_a_function_of_its_input(mesh: Mesh):
    model = classifier()
    x = batches()[0][0]
    on_mesh = atf.function(model, mesh=mesh)
    np.testing.assert_allclose(on_mesh(x, training=False), model(x, training=False), rtol=1e-5, atol=1e-6)


def test_mixed_precision_trains(mesh: Mesh):
    def losses(wrap: Callable[..., Any]) -> list[float]:
        keras.utils.set_random_seed(0)
        layer = keras.layers.Dense(2, dtype="mixed_bfloat16")
        layer.build((None, 8))
        optimizer = keras.optimizers.SGD(0.1)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.cast(layer(x), tf.float32) - y) ** 2)
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
            return loss

        wrapped = wrap(step)
        return [float(wrapped(*batch)) for batch in batches()]

    ours = losses(lambda step: atf.function(step, mesh=mesh))
    np.testing.assert_allclose(ours, losses(lambda step: tf.function(step, jit_compile=True)), rtol=1e-2)
