"""Cuts the optimizer's update over stages: each stage updates its own parameters on its own mesh.

The update of all parameters is traced once, so the optimizer sees the whole tree. Each equation runs on the stage
whose values it uses. If an equation combines small values of several stages, as in the norm of all gradients, stages
send these values. The update then has several *rounds*, and each round uses values that earlier rounds exported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from atoll.client.jax_internals import Var
from atoll.errors import PipelineError
from atoll.pipelines import equations as eq
from atoll.pipelines.computation import Atom, Computation, Equation, nbytes
from atoll.quantities import human_bytes

# Maximum size of a value that stages send to each other in an update.
SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Round:
    """A computation of one stage in an update.

    `exports` are values for other stages. In a stage's last round, `results` are the indices of the update's outputs.
    """

    stage: int
    computation: Computation
    exports: tuple[Var, ...] = ()
    results: tuple[int, ...] = ()


@dataclass(frozen=True)
class Update:
    """An update in rounds.

    `stages[i]` is the stage with leaf i of the optimizer's state; None if all stages have it. `like[i]` is the
    parameter whose sharding the leaf has, or None.
    """

    inputs: tuple[Var, ...]
    rounds: tuple[Round, ...]
    stages: tuple[int | None, ...]
    like: tuple[int | None, ...]


def cut_update(update: Computation, owners: Sequence[int]) -> Update:
    """Cut an update over stages. Raise PipelineError if stages would send each other values above SMALL_BYTES.

    `update` takes gradients, parameters and the optimizer's leaves, and returns new parameters and leaves. Parameter i
    is on stage `owners[i]`.
    """
    return _Cutter(update, owners).cut()


class _Cutter:
    def __init__(self, update: Computation, owners: Sequence[int]) -> None:
        self.update = update
        self.owners = owners
        self.count = len(owners)
        self.stage: dict[Var, int] = {}
        self.like: dict[Var, int] = {}
        # For values that any stage can compute: the values of stages that they depend on.
        self.made_of: dict[Var, frozenset[Var]] = {}
        for i, var in enumerate(update.inputs[: 2 * self.count]):
            self.stage[var] = owners[i % self.count]
            self.like[var] = i % self.count

    def cut(self) -> Update:
        leaves = list(zip(self.update.inputs[2 * self.count :], self.update.outputs[self.count :], strict=True))
        changed = True
        while changed:  # a leaf belongs to the stage that computes its new value
            for equation in self.update.equations:
                self._place(equation)
            changed = False
            for before, after in leaves:
                if before not in self.stage and after in self.stage:
                    self.stage[before] = self.stage[after]
                    changed = True
                if before not in self.like and after in self.like:
                    self.like[before] = self.like[after]
                    changed = True
        stages = [self.stage.get(before) for before, _ in leaves]
        exports, level = self._exports(stages)
        return Update(
            self.update.inputs,
            tuple(self._rounds(exports, level, stages)),
            tuple(stages),
            tuple(self.like.get(before) for before, _ in leaves),
        )

    def _place(self, equation: Equation) -> None:
        variables = [atom for atom in equation.invars if not eq.is_literal(atom)]
        sources = frozenset(source for var in variables for source in self._sources(var))
        if not sources or equation.primitive.name == "broadcast_in_dim":
            self.made_of.update(dict.fromkeys(equation.outvars, sources))
            return
        largest = max(sources, key=lambda var: (nbytes(var.aval), -self.stage[var]))
        for out in equation.outvars:
            self.stage[out] = self.stage[largest]
            same = [self.like[var] for var in variables if var in self.like and var.aval.shape == out.aval.shape]
            if same:
                self.like[out] = same[0]

    def _sources(self, var: Var) -> frozenset[Var]:
        return frozenset((var,)) if var in self.stage else self.made_of.get(var, frozenset())

    def _exports(self, stages: Sequence[int | None]) -> tuple[list[Var], dict[Var, int]]:
        """Return the values that other stages use, and the round in which each value is known."""
        level: dict[Var, int] = {}
        exports: dict[Var, None] = {}

        def use(var: Var, stage: int, equation: Equation | None) -> int:
            if self.stage[var] == stage:
                return level.get(var, 0)
            if nbytes(var.aval) > SMALL_BYTES:
                what = f"at {eq.place(equation)}" if equation is not None else "in its result"
                raise PipelineError(
                    f"the optimizer combines parameters of stages {self.stage[var]} and {stage} {what}: "
                    f"{var.aval.str_short(short_dtypes=True)} ({human_bytes(nbytes(var.aval))}) would be sent, but "
                    f"stages exchange at most {human_bytes(SMALL_BYTES)} per value, as for a norm of all gradients"
                )
            exports[var] = None
            return level.get(var, 0) + 1

        for equation in self.update.equations:
            outs = [var for var in equation.outvars if var in self.stage]
            for out in outs:
                sources = [
                    source for atom in equation.invars if not eq.is_literal(atom) for source in self._sources(atom)
                ]
                level[out] = max([use(source, self.stage[out], equation) for source in sources], default=0)
        for atom, stage in zip(self.update.outputs, (*self.owners, *stages), strict=True):
            if stage is not None and not eq.is_literal(atom):
                for source in self._sources(atom):
                    use(source, stage, None)
        return list(exports), level

    def _rounds(self, exports: Sequence[Var], level: dict[Var, int], stages: Sequence[int | None]) -> list[Round]:
        rounds = []
        for number in sorted({level.get(var, 0) for var in exports}):
            known = [var for var in exports if level.get(var, 0) < number]
            for stage in sorted(set(self.owners)):
                here = [var for var in exports if level.get(var, 0) == number and self.stage[var] == stage]
                if here:
                    rounds.append(Round(stage, self.update.cut(here, known), exports=tuple(here)))
        for stage in sorted(set(self.owners)):
            results = [i for i, at in enumerate((*self.owners, *stages)) if at == stage or at is None]
            outputs: list[Atom] = [self.update.outputs[i] for i in results]
            rounds.append(Round(stage, self.update.cut(outputs, exports), results=tuple(results)))
        return rounds


def tracer_of(optimizer: Any, unflatten: Callable[[Sequence[Any]], Any], state_tree: Any, microbatches: int) -> Any:
    """Return the update as a function of flat gradients, parameters and leaves of the optimizer's state."""

    def update(
        gradients: Sequence[Any], parameters: Sequence[Any], leaves: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        if microbatches > 1:
            gradients = [gradient / microbatches for gradient in gradients]
        params = unflatten(parameters)
        updates, state = optimizer.update(unflatten(gradients), jax.tree.unflatten(state_tree, leaves), params)
        moved = [
            (parameter + change).astype(parameter.dtype)
            for parameter, change in zip(parameters, jax.tree.leaves(updates), strict=True)
        ]
        return moved, jax.tree.leaves(state)

    return update
