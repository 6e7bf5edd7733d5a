"""`Trainer`: a Keras model trained on a mesh, by Keras' own `fit`.

Keras' loop (epochs, callbacks, validation, logs) is as it is; the functions that it calls for each batch are replaced
by compiled ones over the mesh, while it runs. Between `fit`, `evaluate` and `predict` the tf.Variables are what they
are without a mesh: each call takes their values, and what it changed is written back, also after each epoch, before
callbacks see it.
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
      model: A `keras.Model` after `model.compile(...)`; for `predict` alone it need not be compiled.
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
            raise TypeError(f"a keras.Model is wanted, not {model!r}; functions and layers go to `function`")
        if keras.backend.backend() != "tensorflow":
            raise ValueError(f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow")
        self.model = model
        self.variables = Variables(mesh, shardings)
        self._batch = batch
        self._functions: dict[str, Function] = {}
        self._compiled: Any = None  # what each model.compile makes anew

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """`model.fit`, with its arguments, result and exceptions."""
        given = inspect.signature(self.model.fit).bind(*args, **kwargs)
        with self._attached():
            given.arguments["callbacks"] = self._callbacks(given.arguments.get("callbacks"))
            return self.model.fit(*given.args, **given.kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.evaluate`, likewise."""
        with self._attached():
            return self.model.evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """`model.predict`, likewise."""
        with self._attached():
            return self.model.predict(*args, **kwargs)

    def _callbacks(self, callbacks: Any) -> Any:
        """Keras' callbacks between two of our own: what the others see is written back, what they change is taken."""
        given = list(callbacks.callbacks) if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        given = list(given) if isinstance(given, Sequence) else [given] if given is not None else []
        around = [_WriteBack(self.variables), *given, _Load(self.variables)]
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.callbacks[:] = around
            return callbacks
        return around

    @contextlib.contextmanager
    def _attached(self) -> Iterator[None]:
        """Keras calls our functions, and its metrics are those of the mesh, until the block ends."""
        model = self.model
        if model.run_eagerly:
            raise ValueError("a model with run_eagerly=True runs op by op: there is nothing to compile for a mesh")
        compiled = getattr(model, "_loss_tracker", None)
        if compiled is not self._compiled:
            self._functions.clear()  # it has another optimizer, loss and metrics
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
            # As without a mesh: what was trained until then stays. What failed on the devices has no values.
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
            # Keras' own code is not for autograph.
            traced = tf.function(call, autograph=False)
            self._functions[name] = function(traced, variables=self.variables, batch=self._batch)
        return self._functions[name]

    def _on_batches(self, name: str) -> Callable[[Iterator[Any]], Any]:
        """What Keras calls with an iterator of batches; the logs of the last one."""

        def call(batches: Iterator[Any]) -> Any:
            logs = None
            for _, data in zip(range(self.model.steps_per_execution), batches, strict=False):
                logs = self._function(name)(_plain(data))
            if logs is None:
                raise StopIteration
            return logs

        return call

    def _on_list(self, name: str) -> Callable[[list[Any]], Any]:
        """What Keras calls with a list of batches; the outputs of all."""

        def call(batches: list[Any]) -> Any:
            outputs = [self._function(name)(_plain(data)) for data in batches]
            return keras.tree.map_structure(lambda *parts: tf.constant(np.concatenate(jax.device_get(parts))), *outputs)

        return call

    def _reset_metrics(self) -> None:
        type(self.model).reset_metrics(self.model)
        self.variables.load(self._metric_variables())

    def _metrics_result(self) -> Any:
        if not tf.inside_function():  # train_step asks for it, too, while it is traced
            self.variables.write_back(self._metric_variables())
        return type(self.model).get_metrics_result(self.model)

    def _metric_variables(self) -> list[Any]:
        every = [variable.value for metric in self.model.metrics for variable in metric.variables]
        return [each for each in every if each in self.variables]


class _WriteBack(keras.callbacks.Callback):
    """The first callback: the others see the values of the mesh."""

    def __init__(self, variables: Variables) -> None:
        super().__init__()
        self._variables = variables

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._variables.write_back()

    def on_test_end(self, logs: Any = None) -> None:
        self._variables.write_back()


class _Load(keras.callbacks.Callback):
    """The last callback: the mesh has what the others assigned."""

    def __init__(self, variables: Variables) -> None:
        super().__init__()
        self._variables = variables

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._variables.load()


def _plain(data: Any) -> Any:
    """A batch of Keras' own input pipelines, in which what is left out is an empty optional."""
    return keras.tree.map_structure(lambda each: None if isinstance(each, tf.experimental.Optional) else each, data)
