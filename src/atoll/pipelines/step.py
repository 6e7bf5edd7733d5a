"""A training step: its plan, and the nodes of its program in the schedule's order.

Replicas of a pipeline share the batch, the loss, the gradients and the parameters. XLA sums a gradient within a stage's
mesh. Across replicas, each parameter has one owner: the other replicas send it their gradients, and it adds them in a
fixed order, updates the parameter and sends the new value. So all replicas have bitwise equal parameters on any
devices, and the optimizer's state exists once. Owners are distributed over the replicas, so each replica sends and
receives about as much as in a ring, but in two steps instead of 2 (R - 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.client.jax_internals import Var, leave_out_of_tracebacks
from atoll.pipelines.entries import Kind
from atoll.pipelines.optimizer import Round, Update
from atoll.pipelines.order import Action, Move
from atoll.pipelines.parts import Derivative, PartFunctions, named
from atoll.pipelines.pipeline_cut import ModelPart
from atoll.pipelines.stage_arrays import moved_sharding

leave_out_of_tracebacks(__file__)


@dataclass(frozen=True)
class StagePlan:
    """The mesh of a stage, and the shardings of its arrays by number."""

    mesh: Mesh
    parameters: dict[int, NamedSharding]
    leaves: dict[int, NamedSharding]  # leaves of the optimizer's state
    batch: dict[int, NamedSharding]  # leaves of a micro-batch


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step. Stages, parts and micro-batches are numbered through all replicas, one after the other.

    Parts of different replicas exchange no values. `homes` lists, for each trained parameter, the first stage that uses
    it in each replica. A home sums the gradients of its replica. One of the homes is the `owner`, which sums those of
    all homes and updates the parameter. With `donate`, new parameters and leaves reuse the memory of the old ones.
    """

    stages: Sequence[StagePlan]
    parts: Sequence[ModelPart]
    derivatives: Sequence[Derivative]
    stage_of: Sequence[int]  # stages by part
    source: dict[Var, int]  # parts that compute the values that cross
    targets: dict[Var, tuple[int, ...]]  # parts that use the values that cross
    actions: Sequence[Action]
    microbatches: int  # per replica
    replicas: int
    homes: dict[int, tuple[int, ...]]
    owner: dict[int, int]
    update: Update
    donate: bool

    def replica_of(self, stage: int) -> int:
        return stage * self.replicas // len(self.stages)


@dataclass
class _Values:
    """The values computed so far in a step. A program drops each traced value after its last use."""

    parameters: list[dict[int, Any]]
    batch: list[dict[int, list[Any]]]
    sums: list[dict[int, Any]]  # gradients of parameters by stage
    sent: dict[tuple[Var, int, int], Any] = field(default_factory=dict)  # by value, stage and micro-batch
    shardings: dict[Var, Any] = field(default_factory=dict)
    gradients: dict[tuple[Var, int, int], Any] = field(default_factory=dict)  # by value, computing part and micro-batch
    kept: dict[tuple[int, int], Any] = field(default_factory=dict)
    between: dict[tuple[int, int], Any] = field(default_factory=dict)
    given: dict[tuple[int, int], Any] = field(default_factory=dict)
    losses: dict[int, Any] = field(default_factory=dict)


class PipelineStep:
    """The function that a step's program traces, and the jit functions that it calls."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self._replicas = Replicas(plan)
        self._parts = [
            PartFunctions(i, part, derivative, plan.stages[plan.stage_of[i]].parameters, plan.microbatches)
            for i, (part, derivative) in enumerate(zip(plan.parts, plan.derivatives, strict=True))
        ]
        self._splits = [self._split(number, stage) for number, stage in enumerate(plan.stages)]
        self._zeros = [self._zero(number, stage) for number, stage in enumerate(plan.stages)]
        self._add = jax.jit(named(lambda parts: sum(parts[1:], parts[0]), "sum_gradients"))
        self._zeros_like = jax.jit(named(lambda x: jnp.zeros_like(x), "zeros"))
        self._rounds = [self._round(number, each) for number, each in enumerate(plan.update.rounds)]

    def run(self, parameters: Any, leaves: Any, batch: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Run a step on parameters and the optimizer's leaves by stage, and on the flat leaves of a batch.

        Return the new parameters, the new leaves and the loss.
        """
        plan = self.plan
        numbered = [
            dict(zip(stage.parameters, each, strict=True)) for stage, each in zip(plan.stages, parameters, strict=True)
        ]
        rows = self._replicas.rows(batch)
        cut = [
            dict(zip(stage.batch, split([rows[plan.replica_of(number)][i] for i in stage.batch]), strict=True))
            if stage.batch
            else {}
            for number, (stage, split) in enumerate(zip(plan.stages, self._splits, strict=True))
        ]
        sums = [
            dict(zip(self._trained(number), zero([numbered[number][i] for i in self._trained(number)]), strict=True))
            if plan.microbatches > 1 and self._trained(number)
            else {}
            for number, zero in enumerate(self._zeros)
        ]
        values = _Values(numbered, cut, sums)
        for action in plan.actions:
            if isinstance(action, Move):
                self._move(action, values)
            elif action.whole:
                self._whole(action.entry.part, action.entry.microbatch, values)
            else:
                run = {
                    Kind.FORWARD: self._forward,
                    Kind.BACKWARD: self._backward,
                    Kind.INPUT: self._input_half,
                    Kind.WEIGHTS: self._weights_half,
                }[action.entry.kind]
                run(action.entry.part, action.entry.microbatch, values)
        loss = self._replicas.mean_loss(values.losses)
        parameters, leaves = self._update(numbered, leaves, values.sums)
        return parameters, leaves, loss

    # ---- entries

    def _inputs(self, number: int, microbatch: int, values: _Values) -> list[Any]:
        part, stage = self.plan.parts[number], self.plan.stage_of[number]
        return [
            *(values.parameters[stage][i] for i in part.parameters),
            *(values.batch[stage][i][microbatch % self.plan.microbatches] for i in part.batch),
            *(values.sent[var, stage, microbatch] for var in part.received),
        ]

    def _forward(self, number: int, microbatch: int, values: _Values) -> None:
        made, kept = self._parts[number].forward(self._inputs(number, microbatch, values))
        self._keep_sent(number, microbatch, made, values)
        values.kept[number, microbatch] = kept

    def _keep_sent(self, number: int, microbatch: int, made: Sequence[Any], values: _Values) -> None:
        part, stage = self.plan.parts[number], self.plan.stage_of[number]
        for var, value in zip(part.sent, made, strict=False):
            values.sent[var, stage, microbatch] = value
            values.shardings[var] = value.sharding
        if len(made) > len(part.sent):
            values.losses[microbatch] = made[-1]

    def _given(self, number: int, microbatch: int, values: _Values) -> list[list[Any]]:
        """Return the gradients of each differentiable output of a part, one from each part that uses the output."""
        part, derivative = self.plan.parts[number], self.plan.derivatives[number]
        return [
            [
                values.gradients.pop((part.sent[i], target, microbatch))
                for target in reversed(self.plan.targets[part.sent[i]])
            ]
            if i < len(part.sent)
            else []
            for i in derivative.outputs
        ]

    def _again(self, number: int, microbatch: int, values: _Values) -> list[Any]:
        inputs = self._inputs(number, microbatch, values)
        return [inputs[i] for i in self.plan.derivatives[number].again]

    def _backward(self, number: int, microbatch: int, values: _Values) -> None:
        sums, gradients = self._parts[number].backward(
            self._sums(number, values),
            self._again(number, microbatch, values),
            values.kept.pop((number, microbatch)),
            self._given(number, microbatch, values),
        )
        self._keep_sums(number, sums, values)
        self._keep_gradients(number, microbatch, gradients, values)

    def _whole(self, number: int, microbatch: int, values: _Values) -> None:
        loss, sums, gradients = self._parts[number].whole(
            self._sums(number, values), self._inputs(number, microbatch, values)
        )
        values.losses[microbatch] = loss
        self._keep_sums(number, sums, values)
        self._keep_gradients(number, microbatch, gradients, values)

    def _input_half(self, number: int, microbatch: int, values: _Values) -> None:
        given = values.given[number, microbatch] = self._given(number, microbatch, values)
        if not self._parts[number].has_input_half:
            values.between[number, microbatch] = []
            return
        gradients, between = self._parts[number].input_half(
            self._again(number, microbatch, values), values.kept[number, microbatch], given
        )
        values.between[number, microbatch] = between
        self._keep_gradients(number, microbatch, gradients, values)

    def _weights_half(self, number: int, microbatch: int, values: _Values) -> None:
        key = number, microbatch
        sums = self._parts[number].weights_half(
            self._sums(number, values),
            self._again(number, microbatch, values),
            values.kept.pop(key),
            values.given.pop(key),
            values.between.pop(key),
        )
        self._keep_sums(number, sums, values)

    def _trained(self, stage: int) -> list[int]:
        return [i for i in self.plan.stages[stage].parameters if i in self.plan.owner]

    def _of_part(self, number: int) -> list[int]:
        part = self.plan.parts[number]
        return [part.parameters[i] for i in self.plan.derivatives[number].parameters]

    def _sums(self, number: int, values: _Values) -> list[Any]:
        if self.plan.microbatches == 1:
            return []
        return [values.sums[self.plan.stage_of[number]][i] for i in self._of_part(number)]

    def _keep_sums(self, number: int, sums: Sequence[Any], values: _Values) -> None:
        here = values.sums[self.plan.stage_of[number]]
        for i, each in zip(self._of_part(number), sums, strict=True):
            # With one micro-batch there are no sums, but two parts of a stage may use the same parameter.
            here[i] = self._add([here[i], each]) if self.plan.microbatches == 1 and i in here else each

    def _keep_gradients(self, number: int, microbatch: int, gradients: Sequence[Any], values: _Values) -> None:
        part, derivative = self.plan.parts[number], self.plan.derivatives[number]
        first = len(part.parameters) + len(part.batch)
        for i, gradient in zip(derivative.received, gradients, strict=True):
            values.gradients[part.received[i - first], number, microbatch] = gradient

    # ---- between stages

    def _move(self, move: Move, values: _Values) -> None:
        plan = self.plan
        if move.gradients:
            here = plan.parts[move.source].received
            for var in (var for var in here if plan.source[var] == move.target):
                key = var, move.source, move.microbatch
                if key in values.gradients:
                    values.gradients[key] = jax.device_put(values.gradients[key], values.shardings[var])
            return
        source, target = plan.stage_of[move.source], plan.stage_of[move.target]
        for var in (var for var in plan.parts[move.target].received if plan.source[var] == move.source):
            if (var, target, move.microbatch) not in values.sent:
                value = values.sent[var, source, move.microbatch]
                values.sent[var, target, move.microbatch] = jax.device_put(
                    value, moved_sharding(value, plan.stages[target].mesh)
                )

    # ---- the update

    def _update(self, parameters: list[dict[int, Any]], leaves: Any, sums: list[dict[int, Any]]) -> tuple[Any, Any]:
        plan = self.plan
        gradients = self._replicas.summed(
            {
                (number, home): self._summed(number, home, parameters, sums)
                for number, homes in plan.homes.items()
                for home in homes
            }
        )
        trainable = list(plan.owner)
        count = len(trainable)
        numbered = [dict(zip(stage.leaves, each, strict=True)) for stage, each in zip(plan.stages, leaves, strict=True)]
        exports: dict[Var, Any] = {}
        results: list[dict[int, Any]] = [{} for _ in plan.stages]
        inputs: dict[Var, int] = {var: i for i, var in enumerate(plan.update.inputs)}
        for each, run in zip(plan.update.rounds, self._rounds, strict=True):

            def value(var: Var, stage: int = each.stage) -> Any:
                i = inputs.get(var)
                if i is None:
                    here = plan.stages[stage].mesh
                    return jax.device_put(exports[var], NamedSharding(here, PartitionSpec()))
                if i < count:
                    return gradients[trainable[i]]
                if i < 2 * count:
                    return parameters[stage][trainable[i - count]]
                return numbered[stage][i - 2 * count]

            replaced, rest = self._replaced(each)
            made = run([value(var) for var in replaced], [value(var) for var in rest])
            exports.update(zip(each.exports, made, strict=False))
            results[each.stage].update(zip(each.results, made, strict=False))
        made = {number: results[owner][i] for i, (number, owner) in enumerate(plan.owner.items())}
        new = self._replicas.everywhere(made, parameters)
        return new, [[results[at][count + i] for i in stage.leaves] for at, stage in enumerate(plan.stages)]

    def _summed(self, number: int, home: int, parameters: Any, sums: list[dict[int, Any]]) -> Any:
        """Return the gradient of a parameter in one replica, summed over the stages that use it."""
        sharding = self.plan.stages[home].parameters[number]
        parts = [
            here[number] if at == home else jax.device_put(here[number], sharding)
            for at, here in enumerate(sums)
            if number in here and self.plan.replica_of(at) == self.plan.replica_of(home)
        ]
        if not parts:  # no part uses it
            return self._zeros_like(parameters[home][number])
        return parts[0] if len(parts) == 1 else self._add(parts)

    # ---- small functions of a stage

    def _split(self, number: int, stage: StagePlan) -> Any:
        count = self.plan.microbatches
        shardings = [[sharding] * count for sharding in stage.batch.values()]

        def split(leaves: Sequence[Any]) -> list[list[Any]]:
            """Put row r into micro-batch r modulo the number of micro-batches, so that rows stay on their devices."""
            if count == 1:
                return [[leaf] for leaf in leaves]
            cut = [leaf.reshape(-1, count, *leaf.shape[1:]) if leaf.ndim else leaf for leaf in leaves]
            return [[leaf[:, i] if leaf.ndim else leaf for i in range(count)] for leaf in cut]

        return jax.jit(
            named(split, f"stage_{number}_microbatches"),
            in_shardings=(list(stage.batch.values()),),
            out_shardings=shardings,
        )

    def _zero(self, number: int, stage: StagePlan) -> Any:
        shardings = [stage.parameters[i] for i in self._trained(number)]
        return jax.jit(
            named(lambda like: [jnp.zeros(each.shape, each.dtype) for each in like], f"stage_{number}_zeros"),
            out_shardings=shardings,
        )

    def _replaced(self, each: Round) -> tuple[list[Var], list[Var]]:
        """Split the inputs of a round into those that its results replace and the others.

        Only the last round of a stage has results: its parameters and the optimizer's leaves.
        """
        state = set(self.plan.update.inputs[len(self.plan.owner) :]) if each.results else set()
        inputs = each.computation.inputs
        return [var for var in inputs if var in state], [var for var in inputs if var not in state]

    def _round(self, number: int, each: Round) -> Any:
        here, trainable = self.plan.stages[each.stage], list(self.plan.owner)
        count = len(trainable)
        replaced, rest = self._replaced(each)
        computation = each.computation.taking((*replaced, *rest))
        shardings = [here.parameters[trainable[i]] if i < count else here.leaves[i - count] for i in each.results]
        name = f"stage_{each.stage}_update" + ("" if each.results else f"_round_{number}")
        return jax.jit(
            named(lambda replaced, rest: computation(*replaced, *rest), name),
            donate_argnums=(0,) if self.plan.donate and each.results else (),
            out_shardings=shardings or None,
        )


class Replicas:
    """The functions of a step that combine replicas. With one replica, they change nothing."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._cut = jax.jit(named(lambda leaf: jnp.split(leaf, plan.replicas), "replicas_rows"))
        self._mean = jax.jit(named(lambda losses: sum(losses[1:], losses[0]) / len(losses), "mean_loss"))
        self._add = jax.jit(named(lambda some: [sum(parts[1:], parts[0]) for parts in some], "sum_replicas"))

    def rows(self, batch: Sequence[Any]) -> list[list[Any]]:
        """Return each replica's rows of the batch's leaves. `Batch.leaves_of` has already split NumPy leaves."""
        count = self._plan.replicas
        if count == 1:
            return [list(batch)]
        each = [self._pieces(leaf) for leaf in batch]
        return [[pieces[replica] for pieces in each] for replica in range(count)]

    def _pieces(self, leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, list):
            return leaf
        pieces: Sequence[Any] = self._cut(leaf) if np.ndim(leaf) else [leaf] * self._plan.replicas
        return pieces

    def mean_loss(self, losses: Mapping[int, Any]) -> Any:
        """Return the mean over all micro-batches of all replicas, which have equal numbers of rows."""
        count = self._plan.microbatches
        means = []
        for first in range(0, len(losses), count):
            some = [losses[first + i] for i in range(count)]
            means.append(self._mean(some) if count > 1 else some[0])
        if len(means) == 1:
            return means[0]
        return self._mean([means[0], *(jax.device_put(each, means[0].sharding) for each in means[1:])])

    def summed(self, gradients: Mapping[tuple[int, int], Any]) -> dict[int, Any]:
        """Sum gradients, which are given by parameter and home, at their owners in the order of the replicas.

        All gradients are sent before the first addition, and each stage sums all its parameters in one function.
        """
        plan = self._plan
        parts: dict[int, dict[int, list[Any]]] = {}  # by owner and parameter
        for number, owner in plan.owner.items():
            sharding = plan.stages[owner].parameters[number]
            parts.setdefault(owner, {})[number] = [
                gradients[number, home] if home == owner else jax.device_put(gradients[number, home], sharding)
                for home in plan.homes[number]
            ]
        summed: dict[int, Any] = {}
        for here in parts.values():
            several = {number: some for number, some in here.items() if len(some) > 1}
            summed.update((number, some[0]) for number, some in here.items() if number not in several)
            if several:
                summed.update(zip(several, self._add(list(several.values())), strict=True))
        return summed

    def everywhere(self, updated: Mapping[int, Any], parameters: Sequence[Mapping[int, Any]]) -> list[list[Any]]:
        """Distribute updated parameters, and return the parameters of all stages.

        Owners send updated parameters to the other homes, and each home sends them to the stages of its replica that
        use them. Other parameters are unchanged.
        """
        plan = self._plan
        at_home = {
            (number, plan.replica_of(home)): updated[number]
            if home == plan.owner[number]
            else jax.device_put(updated[number], plan.stages[home].parameters[number])
            for number, homes in plan.homes.items()
            for home in homes
        }
        new: list[list[Any]] = []
        for stage, here in enumerate(plan.stages):
            new.append([])
            for number, sharding in here.parameters.items():
                if number not in updated:
                    new[-1].append(parameters[stage][number])
                    continue
                value = at_home[number, plan.replica_of(stage)]
                new[-1].append(value if stage in plan.homes[number] else jax.device_put(value, sharding))
        return new
