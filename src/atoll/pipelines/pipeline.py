"""`atoll.pipeline`: training steps of a model over several stages, from its loss function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from atoll.errors import PipelineError
from atoll.pipelines.computation import nbytes
from atoll.pipelines.pipeline_builder import Built, Wanted, build
from atoll.pipelines.schedule import Schedule
from atoll.pipelines.schedules import schedule as schedule_named
from atoll.pipelines.stage_meshes import check_apart
from atoll.pipelines.trees import Batch, Parameters
from atoll.programs.meshes import mesh_of
from atoll.quantities import human_bytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineState:
    """What a step changes, by stage of each replica: parameters, and the optimizer's state. A tree of arrays;
    `Pipeline.params` and `Pipeline.optimizer_state` give it in the user's own form."""

    parameters: list[list[Any]]
    optimizer: list[list[Any]]


def pipeline(
    loss_fn: Callable[[Any, Any], Any],
    stages: Sequence[Any],
    microbatches: int,
    optimizer: Any,
    schedule: str | Schedule = "1f1b",
    *,
    replicas: int = 1,
    param_specs: Any = None,
    batch_specs: Any = None,
    donate: bool = True,
) -> Pipeline:
    """Training steps of a model that is cut over several meshes, each step one program and one launch. For example::

        pipe = atoll.pipeline(loss_fn, stages=[a, b], microbatches=8, optimizer=optax.adam(1e-3))
        state = pipe.init(params, batch)
        for batch in batches:
            state, loss = pipe.step(state, batch)
        params = pipe.params(state)

    `loss_fn(params, batch)` is written for one device or one mesh, and gives the mean over the rows of its batch. It is
    traced once and cut where `atoll.stage_boundary(x)` stands (of more marks than needed, where the parts cost alike),
    or, without marks, where the parts cost alike and few bytes cross. Parameters live where they are used.

    Args:
      stages: for each a `jax.sharding.Mesh`, a slice, a list of devices or a device. Within a mesh of several devices
        XLA shards as in jit: rows of the batch over its first axis, parameters as their own sharding or `param_specs`
        say.
      microbatches: into how many a batch is cut (with replicas, each one's rows of it): row r is of micro-batch
        r modulo `microbatches`.
      optimizer: with optax's `init` and `update`. It sees the whole tree of parameters.
      schedule: "gpipe", "1f1b", "interleaved", "zb-h1", or a `Schedule`.
      replicas: how many pipelines share a batch, each of as many rows that follow one another. `stages` are then those
        of the first replica, of the second, and so on. Each parameter is updated on one of them, with the sum of all
        gradients, and sent to the others.
      param_specs, batch_specs: each a `jax.sharding.PartitionSpec`, or a prefix of the tree with such leaves.
      donate: whether `step` consumes its state.

    Raises:
      atoll.PipelineError: from here, or from `init`; it names the value, the parameter or the entry.
    """
    return Pipeline(loss_fn, stages, microbatches, optimizer, schedule, replicas, param_specs, batch_specs, donate)


class Pipeline:
    """Made by `pipeline`."""

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        stages: Sequence[Any],
        microbatches: int,
        optimizer: Any,
        schedule: str | Schedule,
        replicas: int,
        param_specs: Any,
        batch_specs: Any,
        donate: bool,
    ) -> None:
        if not stages:
            raise PipelineError("a pipeline has one stage or more")
        if replicas < 1 or len(stages) % replicas:
            raise PipelineError(
                f"{len(stages)} stages are not those of {replicas} replicas: list the stages of the first one, of the "
                "second, and so on, as many of each"
            )
        if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
            raise PipelineError(
                f"an optimizer has init(params) and update(gradients, state, params), and {optimizer!r} not"
            )
        meshes = [mesh_of(stage, f"stage {number}", PipelineError) for number, stage in enumerate(stages)]
        each = len(stages) // replicas
        check_apart([meshes[first : first + each] for first in range(0, len(meshes), each)])
        if isinstance(schedule, str):
            schedule = schedule_named(schedule, each, microbatches)
        if (schedule.stages, schedule.microbatches) != (each, microbatches):
            raise PipelineError(
                f"the schedule {schedule.name!r} is for {schedule.stages} stages and {schedule.microbatches} "
                f"micro-batches, and {'a replica' if replicas > 1 else 'the pipeline'} has {each} and {microbatches}"
            )
        schedule.check()
        self.schedule = schedule
        self.replicas = replicas
        self._wanted = Wanted(loss_fn, optimizer, schedule, meshes, replicas, donate)
        self._param_specs, self._batch_specs = param_specs, batch_specs
        self._built: Built | None = None

    def init(self, params: Any, batch: Any) -> PipelineState:
        """Cuts the model for batches of this kind, and puts the parameters where they are used: the first state.

        `params` is a tree whose arrays are parameters; what else is in it (a function, a number) stays as it is. Those
        that are no floating-point numbers are not trained.
        """
        parameters = Parameters(params, self._param_specs)
        self._built = built = build(
            self._wanted, parameters, Batch(batch, self._batch_specs, self.schedule.microbatches, self.replicas)
        )
        arrays: dict[int, Any] = dict(enumerate(parameters.arrays))
        placed: list[list[Any]] = []
        for stage in built.plan.stages:
            here = {i: jax.device_put(arrays[i], sharding, may_alias=False) for i, sharding in stage.parameters.items()}
            arrays.update(here)  # the next stage gets it from this one, not from the client once more
            placed.append(list(here.values()))
        return PipelineState(placed, [built.first_leaves(number, placed) for number in range(len(placed))])

    def step(self, state: PipelineState, batch: Any) -> tuple[PipelineState, Any]:
        """One step of training: the next state, and the loss before it, a scalar on the last stage (of the first
        replica). Waits for nothing.

        The given state is consumed, unless the pipeline was made with `donate=False`. The batch is of the kind that
        `init` was given; its leaves are arrays of NumPy or of JAX.
        """
        built = self._known()
        parameters, leaves, loss = built.program(*built.arguments(state.parameters, state.optimizer, batch))
        return PipelineState(parameters, leaves), loss

    def lower(self, state: PipelineState, batch: Any) -> Any:
        """The program of a step before it runs; `lower(...).as_text()` shows it."""
        built = self._known()
        return built.program.lower(*built.arguments(state.parameters, state.optimizer, batch))

    def params(self, state: PipelineState) -> Any:
        """The parameters, as the tree that `init` was given; each array is on the stage that first uses it."""
        built = self._known()
        arrays = list(built.parameters.arrays)
        for i, stage in reversed(list(enumerate(built.plan.stages))):
            for number, array in zip(stage.parameters, state.parameters[i], strict=True):
                arrays[number] = array
        return built.parameters.tree_of(arrays)

    def optimizer_state(self, state: PipelineState) -> Any:
        """The optimizer's state, as its `init` gives it for the whole tree."""
        built = self._known()
        leaves: dict[int, Any] = {}
        for stage, here in zip(built.plan.stages, state.optimizer, strict=True):
            leaves = dict(zip(stage.leaves, here, strict=True)) | leaves
        return jax.tree.unflatten(built.state_tree, [leaves[i] for i in sorted(leaves)])

    def summary(self) -> str:
        """The parts: where they run, what they cost, their parameters, and what crosses from one to another."""
        built = self._known()
        total = sum(part.flops for part in built.cut.parts) or 1.0
        lines = [f"each of {self.replicas} replicas:"] if self.replicas > 1 else []
        for number, part in enumerate(built.cut.parts):
            size = sum(nbytes(built.parameters.arrays[i]) for i in part.parameters)
            lines.append(
                f"part {number} on stage {self.schedule.stage_of(number)}: {100 * part.flops / total:.0f} % of the "
                f"operations, {len(part.parameters)} parameters ({human_bytes(size)})"
            )
            lines += [f"  {crossing}" for crossing in built.cut.crossings if crossing.source == number]
        return "\n".join(lines)

    def _known(self) -> Built:
        if self._built is None:
            raise PipelineError("call init(params, batch) first: it cuts the model")
        return self._built
