"""Tests of Keras' fit on a mesh: its histories, callbacks and metrics are the same as without a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh

tf = pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

import keras  # noqa: E402

from atoll import tensorflow as atf  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(72, 8)).astype("f4")
Y = (X.sum(1) > 0).astype("i4")


def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    made = keras.Sequential(
        [layers.Input((8,)), layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.AdamW(1e-2), loss, metrics=["accuracy"])
    return made


class Observed(keras.callbacks.Callback):
    """Callback that records the weights after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[np.ndarray] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.weights.append(self.model.get_weights()[0].copy())
        self.model.optimizer.learning_rate = 1e-2 / (epoch + 2)


def run(trained: Any, keras_model: keras.Model) -> tuple[dict[str, list[float]], list[np.ndarray], Any, np.ndarray]:
    observed = Observed()
    stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=0.1, restore_best_weights=True)
    options = {"batch_size": 32, "validation_data": (X[:40], Y[:40]), "shuffle": False, "verbose": 0}
    history = trained.fit(X, Y, epochs=6, callbacks=[observed, stopping], **options).history
    return history, observed.weights, trained.evaluate(X, Y, verbose=0), trained.predict(X, verbose=0)


def test_fit_evaluate_and_predict_are_those_of_keras_with_callbacks_and_validation(mesh: Mesh):
    """Also with a short last batch, and where callbacks set the learning rate and restore the best weights."""
    ours, theirs = model(), model()
    trainer = atf.Trainer(ours, mesh=mesh)
    history, weights, evaluated, predicted = run(trainer, ours)
    expected, their_weights, their_evaluated, their_predicted = run(theirs, theirs)
    assert {name: pytest.approx(values, rel=1e-4) for name, values in expected.items()} == history
    assert len(expected["loss"]) < 6  # it was stopped
    np.testing.assert_allclose(weights, their_weights, rtol=1e-3, atol=1e-5)
    assert evaluated == pytest.approx(their_evaluated, rel=1e-4)
    np.testing.assert_allclose(predicted, their_predicted, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(trainer.predict(X[:8], verbose=0), their_predicted[:8], rtol=1e-3, atol=1e-5)
    # Without the trainer the model is as Keras left it, and has what was trained.
    assert ours.evaluate(X, Y, verbose=0) == pytest.approx(their_evaluated, rel=1e-4)
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations)


@pytest.mark.thorough
def test_a_dataset_of_tf_data_is_fitted_and_a_model_that_is_compiled_anew_is_traced_anew(mesh: Mesh):
    made = model()
    trainer = atf.Trainer(made, mesh=mesh)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
    first = trainer.fit(dataset, shuffle=False, verbose=0).history
    assert trainer.variables[made.optimizer.iterations] == 3
    made.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy", metrics=[])
    second = trainer.fit(dataset, shuffle=False, verbose=0).history
    assert (set(first), set(second)) == ({"accuracy", "loss"}, {"loss"})
    assert int(made.optimizer.iterations) == 3


@pytest.mark.thorough
def test_an_exception_in_a_callback_leaves_the_model_with_what_was_trained(mesh: Mesh):
    made = model()
    before = made.get_weights()[0]

    def fail(batch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(KeyboardInterrupt):
        atf.Trainer(made, mesh=mesh).fit(X, Y, batch_size=24, verbose=0, callbacks=[stop])
    assert int(made.optimizer.iterations) == 1
    assert np.abs(made.get_weights()[0] - before).max() > 0
    assert "train_function" not in vars(made) or not vars(made)["train_function"]


def test_what_is_no_keras_model_or_runs_eagerly_is_refused(mesh: Mesh):
    with pytest.raises(TypeError, match=r"expected a keras.Model"):
        atf.Trainer(keras.layers.Dense(2), mesh=mesh)
    eager = model()
    eager.run_eagerly = True
    with pytest.raises(ValueError, match="run_eagerly=True"):
        atf.Trainer(eager, mesh=mesh).fit(X, Y, verbose=0)
