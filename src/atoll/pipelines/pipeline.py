"""`atoll.pipeline`: makes training steps on several stages from a loss function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from atoll.errors import PipelineError
from atoll.pipelines.computation import nbytes
from atoll.pipelines.pipeline_builder import BuiltPipeline, PipelineArguments, build
from atoll.pipelines.schedule import Schedule
from atoll.pipelines.schedules import schedule as schedule_named
from atoll.pipelines.stage_arrays import Batch, Parameters, check_apart
from atoll.programs.meshes import mesh_of
from atoll.quantities import counted, human_bytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineState:
    """The parameters and the optimizer's state, by stage of each replica: a tree of arrays that a step replaces.

    `Pipeline.params` and `Pipeline.optimizer_state` convert it to the user's trees.
    """

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
    """Make training steps of a model that is cut over several meshes. Each step is one program and one launch::

        pipe = atoll.pipeline(loss_fn, stages=[a, b], microbatches=8, optimizer=optax.adam(1e-3))
        state = pipe.init(params, batch)
        for batch in batches:
            state, loss = pipe.step(state, batch)
        params = pipe.params(state)

    `loss_fn(params, batch)` is written for one device or one mesh, and returns the mean over the rows of its batch. It
    is traced once and cut at each `atoll.stage_boundary(x)`. If there are more marks than needed, the cut uses those
    that balance the costs of the parts best. Without marks, it balances the costs and minimizes the transferred bytes.
    Each parameter is stored on the stages that use it.

    Args:
      loss_fn: computes the loss from the parameters and a batch.
      stages: a `jax.sharding.Mesh`, a slice, a list of devices or a device per stage. Within a mesh, XLA shards as in
        jit: rows of the batch over the first axis, and parameters by their own sharding or by `param_specs`.
      microbatches: the number of micro-batches per batch and replica. Row r of a replica's rows belongs to micro-batch
        r modulo `microbatches`.
      optimizer: an object with `init` and `update` as in optax. It sees the whole tree of parameters.
      schedule: "gpipe", "1f1b", "interleaved", "zb-h1", or a `Schedule`.
      replicas: the number of pipelines that share a batch; each gets an equal range of consecutive rows. `stages` lists
        the stages of the first replica, then those of the second, and so on. One replica updates each parameter with
        the sum of all gradients and sends it to the others.
      param_specs, batch_specs: a `jax.sharding.PartitionSpec`, or a prefix of the tree with such leaves.
      donate: whether `step` consumes its state.

    Raises:
      atoll.PipelineError: an argument does not fit, or, from `init`, the model cannot be cut. The message names the
        value, the parameter or the entry.
    """
    return Pipeline(loss_fn, stages, microbatches, optimizer, schedule, replicas, param_specs, batch_specs, donate)


class Pipeline:
    """Training steps on several stages. Made by `pipeline`."""

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
        if not isinstance(stages, Sequence):
            raise PipelineError(
                f"stages is {stages!r}: expected a list with a slice, mesh, list of devices or device per stage"
            )
        if not stages:
            raise PipelineError("a pipeline needs at least one stage")
        if replicas < 1 or len(stages) % replicas:
            raise PipelineError(
                f"{counted(len(stages), 'stage')} cannot be divided among {counted(replicas, 'replica')}: list the "
                "same number of stages for each replica, one replica after the other"
            )
        if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
            raise PipelineError(
                f"an optimizer must have init(params) and update(gradients, state, params), got {optimizer!r}"
            )
        meshes = [mesh_of(stage, f"stage {number}", PipelineError) for number, stage in enumerate(stages)]
        each = len(stages) // replicas
        check_apart([meshes[first : first + each] for first in range(0, len(meshes), each)])
        if isinstance(schedule, str):
            schedule = schedule_named(schedule, each, microbatches)
        if (schedule.stages, schedule.microbatches) != (each, microbatches):
            has = f"{counted(schedule.stages, 'stage')} and {counted(schedule.microbatches, 'micro-batch')}"
            raise PipelineError(
                f"the schedule {schedule.name!r} is for {has}, but "
                f"{'a replica' if replicas > 1 else 'the pipeline'} has {each} and {microbatches}"
            )
        schedule.check()
        self.schedule = schedule
        self.replicas = replicas
        self._arguments = PipelineArguments(loss_fn, optimizer, schedule, meshes, replicas, donate)
        self._param_specs, self._batch_specs = param_specs, batch_specs
        self._built: BuiltPipeline | None = None

    def init(self, params: Any, batch: Any) -> PipelineState:
        """Cut the model for batches of this kind, and put the parameters on their stages. Return the first state.

        The arrays in the tree `params` are parameters; all other leaves, such as functions and Python numbers, are
        constants. Only floating-point parameters are trained.
        """
        self._built = built = self._build(params, batch)
        arrays: dict[int, Any] = dict(enumerate(built.parameters.arrays))
        placed: list[list[Any]] = []
        for stage in built.plan.stages:
            here = {i: jax.device_put(arrays[i], sharding, may_alias=False) for i, sharding in stage.parameters.items()}
            arrays.update(here)  # later stages copy a shared parameter from this stage instead of the client
            placed.append(list(here.values()))
        return PipelineState(placed, [built.first_leaves(number, placed) for number in range(len(placed))])

    def cut(self, params: Any, batch: Any) -> PipelineState:
        """Cut the model as `init` does, but compute and store nothing. Return the types of the first state.

        Each leaf is a `jax.ShapeDtypeStruct` with a sharding.
        """
        self._built = built = self._build(params, batch)
        of_optimizer = [var.aval for var in built.first.outputs]
        return PipelineState(
            [
                [_on(built.parameters.types[i], sharding) for i, sharding in stage.parameters.items()]
                for stage in built.plan.stages
            ],
            [[_on(of_optimizer[i], sharding) for i, sharding in stage.leaves.items()] for stage in built.plan.stages],
        )

    def compile_ahead(self, state: PipelineState, batch: Any) -> None:
        """Compile a step for a state and a batch of these types, such as the result of `cut`, without running it."""
        built = self._known()
        built.program.compile_ahead(*built.arguments(state.parameters, state.optimizer, batch))

    def step(self, state: PipelineState, batch: Any) -> tuple[PipelineState, Any]:
        """Run one training step without waiting for it. Return the next state and the loss before the update.

        The loss is a scalar on the last stage of the first replica. The step consumes `state`, unless the pipeline was
        made with `donate=False`. The batch must have the same structure, shapes and types as the one passed to `init`;
        its leaves are NumPy or JAX arrays.
        """
        built = self._known()
        parameters, leaves, loss = built.program(*built.arguments(state.parameters, state.optimizer, batch))
        return PipelineState(parameters, leaves), loss

    def lower(self, state: PipelineState, batch: Any) -> Any:
        """Return the lowered program of a step. `lower(...).as_text()` shows it."""
        built = self._known()
        return built.program.lower(*built.arguments(state.parameters, state.optimizer, batch))

    def params(self, state: PipelineState) -> Any:
        """Return the parameters as a tree like the one passed to `init`. Each array is on its first stage."""
        built = self._known()
        arrays = list(built.parameters.arrays)
        for i, stage in reversed(list(enumerate(built.plan.stages))):
            for number, array in zip(stage.parameters, state.parameters[i], strict=True):
                arrays[number] = array
        return built.parameters.tree_of(arrays)

    def optimizer_state(self, state: PipelineState) -> Any:
        """Return the optimizer's state for the whole tree of parameters, as the optimizer's `init` does."""
        built = self._known()
        leaves: dict[int, Any] = {}
        for stage, here in zip(built.plan.stages, state.optimizer, strict=True):
            leaves = dict(zip(stage.leaves, here, strict=True)) | leaves
        return jax.tree.unflatten(built.state_tree, [leaves[i] for i in sorted(leaves)])

    def summary(self) -> str:
        """Describe the parts: their stages, costs and parameters, and the values that they send to other parts."""
        built = self._known()
        total = sum(part.flops for part in built.cut.parts) or 1.0
        lines = [f"each of {self.replicas} replicas:"] if self.replicas > 1 else []
        for number, part in enumerate(built.cut.parts):
            size = sum(nbytes(built.parameters.arrays[i]) for i in part.parameters)
            lines.append(
                f"part {number} on stage {self.schedule.stage_of(number)}: {100 * part.flops / total:.0f} % of the "
                f"operations, {counted(len(part.parameters), 'parameter')} ({human_bytes(size)})"
            )
            lines += [f"  {crossing}" for crossing in built.cut.crossings if crossing.source == number]
        return "\n".join(lines)

    def _build(self, params: Any, batch: Any) -> BuiltPipeline:
        parameters = Parameters(params, self._param_specs)
        return build(
            self._arguments, parameters, Batch(batch, self._batch_specs, self.schedule.microbatches, self.replicas)
        )

    def _known(self) -> BuiltPipeline:
        if self._built is None:
            raise PipelineError("call init(params, batch) before other methods: it cuts the model")
        return self._built


def _on(type_: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype, sharding=sharding)
