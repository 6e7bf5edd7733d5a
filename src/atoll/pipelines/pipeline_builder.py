"""Builds a pipeline for one kind of parameters and batches, from the loss function to the program of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.errors import PipelineError
from atoll.pipelines import equations as eq
from atoll.pipelines.computation import Computation, flat, is_inexact, nbytes, trace
from atoll.pipelines.optimizer import Update, cut_update, tracer_of
from atoll.pipelines.order import order, replicated
from atoll.pipelines.parts import derivative
from atoll.pipelines.pipeline_cut import Cut, ModelPart, cut, marks_inside
from atoll.pipelines.schedule import Schedule
from atoll.pipelines.stage_arrays import Batch, Parameters, batch_sharding, parameter_sharding
from atoll.pipelines.step import PipelineStep, StagePlan, StepPlan
from atoll.programs.traced_program import Program

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr


@dataclass(frozen=True)
class PipelineArguments:
    """The user's arguments. `meshes` are the stages of the first replica, then of the second, and so on."""

    loss_fn: Callable[[Any, Any], Any]
    optimizer: Any
    schedule: Schedule
    meshes: Sequence[Mesh]
    replicas: int
    donate: bool


@dataclass(frozen=True)
class BuiltPipeline:
    """A pipeline for one kind of parameters and batches."""

    parameters: Parameters
    batch: Batch
    cut: Cut  # the cut of one replica
    plan: StepPlan
    program: Program
    first: Computation  # computes the optimizer's first state from the trainable parameters
    state_tree: Any

    def arguments(self, parameters: Any, leaves: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
        """Return the program's arguments. Parameters that a stage updates, which are donated, are a separate one."""
        updated: list[list[Any]] = []
        others: list[list[Any]] = []
        for number, (stage, here) in enumerate(zip(self.plan.stages, parameters, strict=True)):
            updated.append([])
            others.append([])
            for i, array in zip(stage.parameters, here, strict=True):
                (updated if self.plan.owner.get(i) == number else others)[number].append(array)
        return updated, leaves, others, self.batch.leaves_of(batch)

    def first_leaves(self, number: int, placed: Sequence[Sequence[Any]]) -> list[Any]:
        """Compute a stage's leaves of the optimizer's first state."""
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


def build(arguments: PipelineArguments, parameters: Parameters, batch: Batch) -> BuiltPipeline:
    """Trace, cut and plan a pipeline without compiling it. Raise PipelineError if the model cannot be cut."""
    schedule = arguments.schedule
    closed = _traced_loss(arguments, parameters, batch)
    # Flatten once per replica, so that replicas have distinct variables.
    cuts = [
        cut(_computation(closed, schedule.parts), len(parameters.arrays), schedule.parts)
        for _ in range(arguments.replicas)
    ]
    made = cuts[0]
    stage_of = [
        replica * schedule.stages + schedule.stage_of(part)
        for replica in range(arguments.replicas)
        for part in range(schedule.parts)
    ]
    parts = [
        _on(part, arguments.meshes[stage])
        for part, stage in zip((part for each in cuts for part in each.parts), stage_of, strict=True)
    ]
    trainable = [i for i, array in enumerate(parameters.arrays) if is_inexact(array)]
    if not trainable:
        raise PipelineError("params has no floating-point array to train")
    users = _users(parts, stage_of, len(parameters.arrays))
    homes = {number: _homes(users[number], schedule.stages) for number in trainable}
    owner = _owners(homes, parameters)
    first, update, state_leaves, state_tree = _traced_optimizer(arguments, parameters, owner)
    links: dict[int, set[int]] = {}
    for each in made.crossings:
        links.setdefault(each.source, set()).update(each.targets)
    actions = order(schedule, {part: sorted(targets) for part, targets in links.items()})
    crossings = [(replica * schedule.parts, each) for replica, some in enumerate(cuts) for each in some.crossings]
    plan = StepPlan(
        [
            _stage(number, mesh, parts, stage_of, users, parameters, batch, update, state_leaves, owner)
            for number, mesh in enumerate(arguments.meshes)
        ],
        parts,
        [derivative(part, set(trainable).__contains__) for part in parts],
        stage_of,
        {each.var: each.source + first_part for first_part, each in crossings},
        {each.var: tuple(target + first_part for target in each.targets) for first_part, each in crossings},
        replicated(actions, arguments.replicas, schedule.parts, schedule.microbatches),
        schedule.microbatches,
        arguments.replicas,
        homes,
        owner,
        update,
        arguments.donate,
    )
    return BuiltPipeline(parameters, batch, made, plan, _step_program(plan), first, state_tree)


def _traced_loss(arguments: PipelineArguments, parameters: Parameters, batch: Batch) -> ClosedJaxpr:
    """Trace the loss of one micro-batch. The inputs are the parameters, then the batch's leaves."""
    count = len(parameters.arrays)

    def flat_loss(*leaves: Any) -> Any:
        loss = arguments.loss_fn(parameters.tree_of(leaves[:count]), batch.tree_of(leaves[count:]))
        if getattr(loss, "shape", None) != () or not is_inexact(loss):
            raise PipelineError(f"the loss function must return a floating-point scalar, got {loss}")
        return loss

    return jax.make_jaxpr(flat_loss)(*parameters.types, *batch.microbatch_types)


def _computation(closed: ClosedJaxpr, parts: int) -> Computation:
    """Return the computation to be cut into `parts` parts.

    A single part keeps the jit calls of the loss function. JAX sums gradients inside a jit call first, so the sums are
    then bitwise equal to those of plain JAX.
    """
    if parts > 1:
        return flat(closed)
    return flat(closed, lambda call: not any(marks_inside(call)))


def _users(parts: Sequence[ModelPart], stage_of: Sequence[int], count: int) -> list[list[int]]:
    """Return the stages that use each parameter. An unused parameter is on the first stage."""
    users: list[list[int]] = [[] for _ in range(count)]
    for part, stage in zip(parts, stage_of, strict=True):
        for number in part.parameters:
            if stage not in users[number]:
                users[number].append(stage)
    return [stages or [0] for stages in users]


def _homes(users: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the first of the stages in each replica, which has `stages` stages."""
    first: dict[int, int] = {}
    for stage in users:
        first.setdefault(stage // stages, stage)
    return tuple(first.values())


def _owners(homes: Mapping[int, Sequence[int]], parameters: Parameters) -> dict[int, int]:
    """Choose the home that updates each parameter: large parameters first, each to the home with the fewest bytes."""
    updates: Counter[int] = Counter()
    owner: dict[int, int] = {}
    for number in sorted(homes, key=lambda number: -nbytes(parameters.arrays[number])):
        owner[number] = min(homes[number], key=lambda stage: (updates[stage], stage))
        updates[owner[number]] += nbytes(parameters.arrays[number])
    return {number: owner[number] for number in homes}


def _traced_optimizer(
    arguments: PipelineArguments, parameters: Parameters, owner: Mapping[int, int]
) -> tuple[Computation, Update, list[Any], Any]:
    """Trace the optimizer.

    Return the computation of its first state, its update in rounds, and the types and the tree of its state.
    """

    def tree_of(values: Sequence[Any]) -> Any:
        some = dict(zip(owner, values, strict=True))
        return parameters.tree_of([some.get(i) for i in range(len(parameters.arrays))], fixed=False)

    types = [parameters.types[i] for i in owner]
    first, shapes = trace(lambda *flat: arguments.optimizer.init(tree_of(flat)), *types)
    leaves, tree = jax.tree.flatten(shapes)
    microbatches = arguments.replicas * arguments.schedule.microbatches
    update, _ = trace(tracer_of(arguments.optimizer, tree_of, tree, microbatches), types, types, leaves)
    return first, cut_update(update, list(owner.values())), leaves, tree


def _stage(
    stage: int,
    mesh: Mesh,
    parts: Sequence[ModelPart],
    stage_of: Sequence[int],
    users: Sequence[Sequence[int]],
    parameters: Parameters,
    batch: Batch,
    update: Update,
    leaves: Sequence[Any],
    owner: Mapping[int, int],
) -> StagePlan:
    trainable = list(owner)
    shardings = {
        i: parameter_sharding(parameters.arrays[i], parameters.specs[i], mesh, parameters.names[i])
        for i, stages in enumerate(users)
        if stage in stages
    }
    whole = NamedSharding(mesh, PartitionSpec())

    def like_its_parameter(i: int) -> NamedSharding:
        number = update.like[i]
        if number is None or parameters.types[trainable[number]].shape != leaves[i].shape:
            return whole
        return shardings.get(trainable[number], whole)

    # A stage that updates no parameter has no leaves of the optimizer's state.
    here = {stage, None} if stage in owner.values() else set()
    taken = sorted({i for part, at in zip(parts, stage_of, strict=True) if at == stage for i in part.batch})
    return StagePlan(
        mesh,
        shardings,
        {i: like_its_parameter(i) for i in range(len(leaves)) if update.stages[i] in here},
        {i: batch_sharding(batch.microbatch_types[i].shape, batch.specs[i], mesh, batch.names[i]) for i in taken},
    )


def _step_program(plan: StepPlan) -> Program:
    """Return the program of a step.

    Its arguments are the parameters that each stage updates, the optimizer's leaves, the other parameters, and the
    batch.
    """
    step = PipelineStep(plan)

    def pipeline_step(updated: Any, leaves: Any, others: Any, batch: Any) -> Any:
        parameters = []
        for number, stage in enumerate(plan.stages):
            mine, rest = iter(updated[number]), iter(others[number])
            parameters.append([next(mine if number == plan.owner.get(i) else rest) for i in stage.parameters])
        return step.run(parameters, leaves, batch)

    donated = (0, 1) if plan.donate else None
    if len(plan.parts) == plan.microbatches == 1:
        # Compile one function as in plain JAX, because XLA might round differently in several functions.
        whole = jax.jit(pipeline_step, donate_argnums=donated)
        return Program(whole, donate_argnums=donated, retrace_after_loss=False)
    return Program(pipeline_step, donate_argnums=donated, retrace_after_loss=False)


def _on(part: ModelPart, mesh: Any) -> ModelPart:
    """Return the part with the stage's mesh in place of the mesh that the model names."""
    computation = part.computation
    equations = tuple(eq.on_mesh(each, mesh) for each in computation.equations)
    return replace(part, computation=replace(computation, equations=equations))
