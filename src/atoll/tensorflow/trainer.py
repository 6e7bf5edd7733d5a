"""`Trainer`: trains a Keras model on a mesh with Keras' own `fit`.

Keras' loop (epochs, callbacks, validation, logs) is unchanged. While it runs, compiled functions on the mesh replace
the functions that it calls for each batch. Each call of `fit`, `evaluate` or `predict` reads the tf.Variables and
writes the new values back at its end, and also after each epoch, before callbacks run. So between calls the
tf.Variables hold the same values as without a mesh.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, PartitionSpec

from atoll.tensorflow.function import Function, function
from atoll.tensorflow.tensorflow_shardings import Rule
from atoll.tensorflow.variables import Variables


class Trainer:
    """Runs the steps of a compiled Keras model (`model.train_step`, `test_step`, `predict_step`) on a mesh.

    Args:
      model: A `keras.Model` after `model.compile(...)`. If you only call `predict`, it need not be compiled.
      mesh, shardings, batch: As in `function`. `batch` is the PartitionSpec of a batch's arrays.
    """

    def __init__(
        self,
        model: Any,
        *,
        mesh: Mesh | None = None,
        shardings: Rule | None = None,
        batch: PartitionSpec | None = None,
    ) -> None:
        if not isinstance(model, keras.Model):
            raise TypeError(f"expected a keras.Model, got {model!r}; use `function` for functions and layers")
        if keras.backend.backend() != "tensorflow":
            raise ValueError(f"Keras uses the backend {keras.backend.backend()}: set KERAS_BACKEND=tensorflow")
        self.model = model
        self.variables = Variables(mesh, shardings)
        self._batch = batch
        self._functions: dict[str, Function] = {}
        self._compiled: Any = None  # the loss tracker, which every model.compile() replaces

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Call `model.fit`, with the same arguments, result and exceptions."""
        given = inspect.signature(self.model.fit).bind(*args, **kwargs)
        with self._attached():
            given.arguments["callbacks"] = self._callbacks(given.arguments.get("callbacks"))
            return self.model.fit(*given.args, **given.kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `model.evaluate`, with the same arguments, result and exceptions."""
        with self._attached():
            return self.model.evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Call `model.predict`, with the same arguments, result and exceptions."""
        with self._attached():
            return self.model.predict(*args, **kwargs)

    def _callbacks(self, callbacks: Any) -> Any:
        """Wrap the callbacks: write the variables back before they run, and load their changes afterwards."""
        given = list(callbacks.callbacks) if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        given = list(given) if isinstance(given, Sequence) else [given] if given is not None else []
        around = [_WriteBack(self.variables), *given, _Load(self.variables)]
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.callbacks[:] = around
            return callbacks
        return around

    @contextlib.contextmanager
    def _attached(self) -> Iterator[None]:
        """Make Keras call the compiled functions and read the metrics of the mesh until the block ends."""
        model = self.model
        if model.run_eagerly:
            raise ValueError("a model with run_eagerly=True cannot be compiled for a mesh: set run_eagerly=False")
        compiled = getattr(model, "_loss_tracker", None)
        if compiled is not self._compiled:
            self._functions.clear()  # the model has a new optimizer, loss and metrics
            self.variables = Variables(self.variables.mesh, self.variables.shardings)
            self._compiled = compiled
        self.variables.load()
        replaced = {
            "train_function": self._on_batches("train_step"),
            "test_function": self._on_batches("test_step"),
            "predict_function": self._on_list("predict_step"),
            "reset_metrics": self._reset_metrics,
            "get_metrics_result": self._metrics_result,
        }
        before = {name: vars(model)[name] for name in replaced if name in vars(model)}
        vars(model).update(replaced)
        try:
            yield
        except BaseException:
            # Keep the results of training so far, as without a mesh. After a failure of devices there are no values.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.variables.write_back()
            raise
        finally:
            for name in replaced:
                vars(model).pop(name, None)
            vars(model).update(before)

    def _function(self, name: str) -> Function:
        if name not in self._functions:
            step = getattr(self.model, name)

            def call(data: Any) -> Any:
                return step(data)

            call.__name__ = name
            # Autograph must not convert Keras' own code.
            traced = tf.function(call, autograph=False)
            self._functions[name] = function(traced, variables=self.variables, batch=self._batch)
        return self._functions[name]

    def _on_batches(self, name: str) -> Callable[[Iterator[Any]], Any]:
        """Return a function that Keras calls with an iterator of batches. It returns the logs of the last batch."""

        def call(batches: Iterator[Any]) -> Any:
            logs = None
            for _, data in zip(range(self.model.steps_per_execution), batches, strict=False):
                logs = self._function(name)(_plain(data))
            if logs is None:
                raise StopIteration
            return logs

        return call

    def _on_list(self, name: str) -> Callable[[list[Any]], Any]:
        """Return a function that Keras calls with a list of batches. It returns the concatenated outputs."""

        def call(batches: list[Any]) -> Any:
            outputs = [self._function(name)(_plain(data)) for data in batches]
            return keras.tree.map_structure(lambda *parts: tf.constant(np.concatenate(jax.device_get(parts))), *outputs)

        return call

    def _reset_metrics(self) -> None:
        type(self.model).reset_metrics(self.model)
        self.variables.load(self._metric_variables())

    def _metrics_result(self) -> Any:
        if not tf.inside_function():  # train_step also calls this while it is traced
            self.variables.write_back(self._metric_variables())
        return type(self.model).get_metrics_result(self.model)

    def _metric_variables(self) -> list[Any]:
        every = [variable.value for metric in self.model.metrics for variable in metric.variables]
        return [each for each in every if each in self.variables]


class _WriteBack(keras.callbacks.Callback):
    """The first callback: it assigns the values on the mesh to the tf.Variables for the other callbacks."""

    def __init__(self, variables: Variables) -> None:
        super().__init__()
        self._variables = variables

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._variables.write_back()

    def on_test_end(self, logs: Any = None) -> None:
        self._variables.write_back()


class _Load(keras.callbacks.Callback):
    """The last callback: it copies to the mesh what the other callbacks assigned to the tf.Variables."""

    def __init__(self, variables: Variables) -> None:
        super().__init__()
        self._variables = variables

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._variables.load()


def _plain(data: Any) -> Any:
    """Return a batch with None in place of the optionals that Keras' input pipelines use for missing elements."""
    return keras.tree.map_structure(lambda each: None if isinstance(each, tf.experimental.Optional) else each, data)
