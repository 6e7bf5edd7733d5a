"""`atoll.pipeline`: training steps of a model over several stages, from its loss function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from atoll.client.program import Program
from atoll.errors import PipelineError
from atoll.pipelines import equations as eq
from atoll.pipelines.computation import Computation, is_inexact, nbytes, trace
from atoll.pipelines.cut import Cut, Part, cut
from atoll.pipelines.meshes import batch_sharding, mesh_of, parameter_sharding
from atoll.pipelines.optimizer import cut_update, tracer_of
from atoll.pipelines.order import order
from atoll.pipelines.parts import derivative
from atoll.pipelines.plan import StagePlan, StepPlan
from atoll.pipelines.schedule import Schedule
from atoll.pipelines.schedules import schedule as schedule_named
from atoll.pipelines.step import Step
from atoll.pipelines.trees import Batch, Parameters
from atoll.quantities import human_bytes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineState:
    """What a step changes, by stage: parameters, and the optimizer's state. A tree of arrays; `Pipeline.params` and
    `Pipeline.optimizer_state` give it in the user's own form."""

    parameters: list[list[Any]]
    optimizer: list[list[Any]]


def pipeline(
    loss_fn: Callable[[Any, Any], Any],
    stages: Sequence[Any],
    microbatches: int,
    optimizer: Any,
    schedule: str | Schedule = "1f1b",
    *,
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
      microbatches: into how many a batch is cut; row r is of micro-batch r modulo `microbatches`.
      optimizer: with optax's `init` and `update`. It sees the whole tree of parameters.
      schedule: "gpipe", "1f1b", "interleaved", "zb-h1", or a `Schedule`.
      param_specs, batch_specs: `jax.sharding.PartitionSpec`s, as a prefix of the tree of params or batch.
      donate: whether `step` consumes its state.

    Raises:
      atoll.PipelineError: from here, or from `init`; it names the value, the parameter or the entry.
    """
    return Pipeline(loss_fn, stages, microbatches, optimizer, schedule, param_specs, batch_specs, donate)


class Pipeline:
    """Made by `pipeline`."""

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        stages: Sequence[Any],
        microbatches: int,
        optimizer: Any,
        schedule: str | Schedule,
        param_specs: Any,
        batch_specs: Any,
        donate: bool,
    ) -> None:
        if not stages:
            raise PipelineError("a pipeline has one stage or more")
        if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
            raise PipelineError(
                f"an optimizer has init(params) and update(gradients, state, params), and {optimizer!r} not"
            )
        self._loss_fn = loss_fn
        self._meshes = [mesh_of(stage, number) for number, stage in enumerate(stages)]
        self._microbatches = microbatches
        self._optimizer = optimizer
        if isinstance(schedule, str):
            schedule = schedule_named(schedule, len(stages), microbatches)
        if (schedule.stages, schedule.microbatches) != (len(stages), microbatches):
            raise PipelineError(
                f"the schedule {schedule.name!r} is for {schedule.stages} stages and {schedule.microbatches} "
                f"micro-batches, and the pipeline has {len(stages)} and {microbatches}"
            )
        schedule.check()
        self.schedule = schedule
        self._param_specs, self._batch_specs, self._donate = param_specs, batch_specs, donate
        self._built: _Built | None = None

    def init(self, params: Any, batch: Any) -> PipelineState:
        """Cuts the model for batches of this kind, and puts the parameters where they are used: the first state.

        `params` is a tree whose arrays are parameters; what else is in it (a function, a number) stays as it is. Those
        that are no floating-point numbers are not trained.
        """
        parameters = Parameters(params, self._param_specs)
        self._built = built = self._build(parameters, Batch(batch, self._batch_specs, self._microbatches))
        placed = [
            [
                jax.device_put(parameters.arrays[i], sharding, may_alias=False)
                for i, sharding in stage.parameters.items()
            ]
            for stage in built.plan.stages
        ]
        return PipelineState(placed, [built.first_leaves(number, placed) for number in range(len(placed))])

    def step(self, state: PipelineState, batch: Any) -> tuple[PipelineState, Any]:
        """One step of training: the next state, and the loss before it, a scalar on the last stage."""
        built = self._known()
        parameters, leaves, loss = built.program(*built.arguments(state, batch))
        return PipelineState(parameters, leaves), loss

    def lower(self, state: PipelineState, batch: Any) -> Any:
        """The program of a step before it runs; `lower(...).as_text()` shows it."""
        built = self._known()
        return built.program.lower(*built.arguments(state, batch))

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
        lines = []
        for number, part in enumerate(built.cut.parts):
            size = sum(nbytes(built.parameters.arrays[i]) for i in part.parameters)
            lines.append(
                f"part {number} on stage {self.schedule.stage_of(number)}: {100 * part.flops / total:.0f} % of the "
                f"operations, {len(part.parameters)} parameters ({human_bytes(size)})"
            )
            lines += [f"  {crossing}" for crossing in built.cut.crossings if crossing.source == number]
        return "\n".join(lines)

    def _known(self) -> _Built:
        if self._built is None:
            raise PipelineError("call init(params, batch) first: it cuts the model")
        return self._built

    # ---- building

    def _build(self, parameters: Parameters, batch: Batch) -> _Built:
        count = len(parameters.arrays)

        def flat_loss(*leaves: Any) -> Any:
            loss = self._loss_fn(parameters.tree_of(leaves[:count]), batch.tree_of(leaves[count:]))
            if getattr(loss, "shape", None) != () or not is_inexact(loss):
                raise PipelineError(f"the loss function gives {loss}; it is to give one floating-point number")
            return loss

        loss, _ = trace(flat_loss, *parameters.types, *batch.microbatch_types)
        made = cut(loss, count, self.schedule.parts)
        stage_of = [self.schedule.stage_of(part) for part in range(self.schedule.parts)]
        parts = [_on(part, self._meshes[stage]) for part, stage in zip(made.parts, stage_of, strict=True)]
        users: dict[int, list[int]] = {number: [] for number in range(count)}
        for part, stage in zip(parts, stage_of, strict=True):
            for number in part.parameters:
                if stage not in users[number]:
                    users[number].append(stage)
        owners = {number: stages[0] if stages else 0 for number, stages in users.items()}
        trainable = [i for i, array in enumerate(parameters.arrays) if is_inexact(array)]
        if not trainable:
            raise PipelineError("params has no array of floating-point numbers: there is nothing to train")

        def tree_of(values: Sequence[Any]) -> Any:
            some = dict(zip(trainable, values, strict=True))
            return parameters.tree_of([some.get(i) for i in range(count)], fixed=False)

        types = [parameters.types[i] for i in trainable]
        first, shapes = trace(lambda *flat: self._optimizer.init(tree_of(flat)), *types)
        state_leaves, state_tree = jax.tree.flatten(shapes)
        update_of = tracer_of(self._optimizer, tree_of, state_tree, self._microbatches)
        traced, _ = trace(update_of, types, types, state_leaves)
        update = cut_update(traced, [owners[number] for number in trainable])
        plans = []
        for number, mesh in enumerate(self._meshes):
            here = sorted(i for i, stages in users.items() if number in stages or (owners[i] == number and not stages))
            shardings = {
                i: parameter_sharding(parameters.arrays[i], parameters.specs[i], mesh, parameters.names[i])
                for i in here
            }
            used = sorted(
                {i for part, stage in zip(parts, stage_of, strict=True) if stage == number for i in part.batch}
            )
            plans.append(
                StagePlan(
                    mesh,
                    shardings,
                    {
                        i: _like(leaf, update.like[i], trainable, parameters, shardings, mesh)
                        for i, leaf in enumerate(state_leaves)
                        if update.stages[i] in (number, None)
                    },
                    {
                        i: batch_sharding(batch.microbatch_types[i].shape, batch.specs[i], mesh, batch.names[i])
                        for i in used
                    },
                )
            )
        links: dict[int, set[int]] = {}
        for each in made.crossings:
            links.setdefault(each.source, set()).update(each.targets)
        plan = StepPlan(
            plans,
            parts,
            [derivative(part, set(trainable).__contains__) for part in parts],
            stage_of,
            {each.var: each.source for each in made.crossings},
            {each.var: each.targets for each in made.crossings},
            order(self.schedule, {part: sorted(targets) for part, targets in links.items()}),
            self._microbatches,
            {number: owners[number] for number in trainable},
            update,
        )
        return _Built(parameters, batch, made, plan, _step_program(plan, self._donate), first, state_tree)


@dataclass(frozen=True)
class _Built:
    """A pipeline for one kind of parameters and batches."""

    parameters: Parameters
    batch: Batch
    cut: Cut
    plan: StepPlan
    program: Program
    first: Computation  # the optimizer's state, of the trainable parameters
    state_tree: Any

    def arguments(self, state: PipelineState, batch: Any) -> tuple[Any, Any, Any, Any]:
        """What the program takes. Only what a stage replaces is donated, not its copies of what others do."""
        updated: list[list[Any]] = []
        others: list[list[Any]] = []
        for number, (stage, here) in enumerate(zip(self.plan.stages, state.parameters, strict=True)):
            updated.append([])
            others.append([])
            for i, array in zip(stage.parameters, here, strict=True):
                (updated if self.plan.owner.get(i) == number else others)[number].append(array)
        return updated, state.optimizer, others, self.batch.leaves_of(batch)

    def first_leaves(self, number: int, placed: Sequence[Sequence[Any]]) -> list[Any]:
        """The optimizer's first leaves of a stage."""
        stage = self.plan.stages[number]
        if not stage.leaves:
            return []
        computation = self.first.cut([self.first.outputs[i] for i in stage.leaves])
        arrays: dict[int, Any] = {}
        for plan, here in zip(self.plan.stages, placed, strict=True):
            arrays.update(zip(plan.parameters, here, strict=True))
        arrays.update(zip(stage.parameters, placed[number], strict=True))
        given = [
            jax.device_put(
                arrays[list(self.plan.owner)[self.first.inputs.index(var)]], NamedSharding(stage.mesh, PartitionSpec())
            )
            for var in computation.inputs
        ]
        run = jax.jit(lambda inputs: computation(*inputs), out_shardings=list(stage.leaves.values()))
        leaves: list[Any] = run(given)
        return leaves


def _step_program(plan: StepPlan, donate: bool) -> Program:
    """Takes what each stage updates, the optimizer's leaves, what it does not update, and the batch."""
    step = Step(plan)

    def pipeline_step(updated: Any, leaves: Any, others: Any, batch: Any) -> Any:
        parameters = []
        for number, stage in enumerate(plan.stages):
            mine, rest = iter(updated[number]), iter(others[number])
            parameters.append([next(mine if number == plan.owner.get(i) else rest) for i in stage.parameters])
        return step.run(parameters, leaves, batch)

    return Program(pipeline_step, donate_argnums=(0, 1) if donate else None)


def _on(part: Part, mesh: Any) -> Part:
    """The part, with the stage's mesh in the place of the one that the model names."""
    computation = part.computation
    equations = tuple(eq.on_mesh(each, mesh) for each in computation.equations)
    return replace(part, computation=replace(computation, equations=equations))


def _like(
    leaf: Any,
    number: int | None,
    trainable: Sequence[int],
    parameters: Parameters,
    shardings: dict[int, NamedSharding],
    mesh: Any,
) -> NamedSharding:
    """How a leaf of the optimizer lies: as the parameter of its shape that it is made of, or whole on each device."""
    if (
        number is not None
        and trainable[number] in shardings
        and parameters.types[trainable[number]].shape == leaf.shape
    ):
        return shardings[trainable[number]]
    return NamedSharding(mesh, PartitionSpec())
