"""Elastic pipelines: the stages are distributed over the available islands, several per island if there are fewer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from atoll.elastic.compile_ahead import type_of
from atoll.elastic.run import Make
from atoll.pipelines.pipeline import Pipeline, PipelineState
from atoll.pipelines.pipeline import pipeline as make_pipeline
from atoll.pipelines.schedule import Schedule


def pipeline(
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    stages: int,
    microbatches: int,
    optimizer: Any,
    schedule: str | Schedule = "1f1b",
) -> Make:
    """Make a training for `elastic.run` from a model that `atoll.pipeline` cuts into stages, one stage per island::

        training = atoll.elastic.pipeline(loss_fn, batch_of(0), stages=4, microbatches=8, optimizer=optax.adam(1e-3))
        run = atoll.elastic.run(training, params, batch_of, steps=500)

    If fewer islands are available, some islands have several stages; the results of a step do not change. If there are
    more islands than stages, some islands have no stage. The first state of the run is the parameters, and the run's
    `state` is an `atoll.PipelineState`. `batch` is any one of the batches; `atoll.pipeline` documents the other
    arguments.
    """
    params: list[Any] = []  # the first parameters, without values

    def make(meshes: Sequence[Mesh]) -> PipelineTraining:
        islands = [meshes[stage * len(meshes) // stages] for stage in range(stages)]
        return PipelineTraining(make_pipeline(loss_fn, islands, microbatches, optimizer, schedule), batch, params)

    return make


class PipelineTraining:
    """A `Training` of one pipeline on certain islands. See `pipeline`."""

    def __init__(self, pipe: Pipeline, batch: Any, params: list[Any]) -> None:
        self._pipe = pipe
        self._batch = batch
        self._params = params
        self._cutting = threading.Lock()
        self._types: PipelineState | None = None  # the types of the pipeline's state, with its shardings

    def place(self, kept: Any) -> PipelineState:
        if not isinstance(kept, PipelineState):
            self._params[:] = [jax.tree.map(_without_values, kept)]
            state = self._pipe.init(kept, self._batch)
            self._types = jax.tree.map(type_of, state)
            return state
        where = jax.tree.map(lambda leaf: leaf.sharding, self._known())
        placed: PipelineState = jax.device_put(kept, where, may_alias=False)
        return placed

    def compile_ahead(self, kept: PipelineState, batch: Any) -> None:
        self._pipe.compile_ahead(
            jax.tree.map(lambda leaf, there: type_of(leaf, there.sharding), kept, self._known()), batch
        )

    def step(self, state: PipelineState, batch: Any) -> tuple[PipelineState, Any]:
        return self._pipe.step(state, batch)

    def keep(self, state: PipelineState) -> PipelineState:
        return state

    def _known(self) -> PipelineState:
        """Return the types of the state on these islands. The first call cuts the model, on one thread."""
        with self._cutting:
            if self._types is None:
                self._types = self._pipe.cut(self._params[0], self._batch)
            return self._types


def _without_values(leaf: Any) -> Any:
    """Return zeros of the same shape and type that take no memory."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
