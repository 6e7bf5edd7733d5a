"""Cuts a traced loss function into the parts of a pipeline.

An equation that depends on both the parameters and the batch belongs to one part, which is determined by the marks
(`stage_boundary`) around it, or by the cuts that `cut_evenly` chose. An equation that depends only on parameters or
only on the batch (a cast, a mask, targets that are cut out of tokens) is computed in each part that needs it. So
parameters are on the stages that use them. An equation that reduces parameters to a much smaller value, such as a
penalty on weights, is computed once, in a part that has these parameters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from atoll.client.jax_internals import Var
from atoll.errors import PipelineError
from atoll.pipelines import equations as eq
from atoll.pipelines.boundary import boundary_p
from atoll.pipelines.computation import Computation, Equation, nbytes
from atoll.quantities import counted, human_bytes

_PARAMETERS, _BATCH = 1, 2
_BOTH = _PARAMETERS | _BATCH
_MUCH_LESS = 16  # least ratio of the input's bytes to the output's bytes for a reduction
# A part may cost this factor more than the costliest part of the most even cut if fewer bytes cross.
SLACK = 1.25


@dataclass(frozen=True)
class ModelPart:
    """A part of the model.

    The computation takes the parameters and the leaves of the batch with these numbers, and the values in `received`.
    It returns the values in `sent`; the last part also returns the loss.
    """

    computation: Computation
    parameters: tuple[int, ...]
    batch: tuple[int, ...]
    received: tuple[Var, ...]
    sent: tuple[Var, ...]
    flops: float


@dataclass(frozen=True)
class Crossing:
    """A value that one part sends to others."""

    var: Var
    source: int
    targets: tuple[int, ...]
    made: str  # place in the user's code
    used: str  # place in the user's code

    def __str__(self) -> str:
        to = ", ".join(map(str, self.targets))
        return (
            f"{self.var.aval.str_short(short_dtypes=True)} ({human_bytes(nbytes(self.var.aval))}) of part "
            f"{self.source} to part {to}: made at {self.made}; used at {self.used}"
        )


@dataclass(frozen=True)
class Cut:
    parts: tuple[ModelPart, ...]
    crossings: tuple[Crossing, ...]


def cut(loss: Computation, parameters: int, parts: int) -> Cut:
    """Cut the computation of a loss, whose first `parameters` inputs are the parameters, into `parts` parts.

    Raises PipelineError if it cannot be cut. If the function has marks, it warns about values that cross without one.
    """
    return _Cutter(loss, parameters).cut(parts)


class _Cutter:
    def __init__(self, loss: Computation, parameters: int) -> None:
        for equation in loss.equations:
            _refuse_hidden_marks(equation)
        self.marks = [each for each in loss.equations if each.primitive is boundary_p]
        # Keep marks whose values are not needed, because they separate parts.
        self.loss = loss.cut((*loss.outputs, *(var for mark in self.marks for var in mark.outvars)))
        _warn_of_effects(loss.equations)
        self.inputs = loss.inputs
        self.parameters = set(loss.inputs[:parameters])
        self.equations = self.loss.equations
        self.maker = {var: equation for equation in self.equations for var in equation.outvars}
        self.depends = self._dependencies()
        self.part_of: dict[Var, int] = {}  # parts by the values that belong to one part

    def cut(self, parts: int) -> Cut:
        fixed = [each for each in self.equations if self._is_fixed(each)]
        if not fixed:
            raise PipelineError("no operation of the loss function depends on both the parameters and the batch")
        numbers = self._by_marks(fixed, parts) if self.marks else self._by_costs(fixed, parts)
        for equation, number in zip(fixed, numbers, strict=True):
            self.part_of.update((var, number) for var in equation.outvars)
        by_part: list[list[Equation]] = [[] for _ in range(parts)]
        for equation, number in zip(fixed, numbers, strict=True):
            by_part[number].append(equation)
        for number, equations in enumerate(by_part):
            if not any(each.primitive is not boundary_p for each in equations):
                raise PipelineError(
                    f"part {number} of {parts} is empty: none of its operations depends on both the parameters and the "
                    f"batch. Move the stage_boundary at {eq.place(self.marks[min(number, len(self.marks) - 1)])}"
                )
        self._keep_reductions_with_their_parameters(by_part)
        (result,) = self.loss.outputs[:1]
        if self.part_of.get(result) != parts - 1:
            raise PipelineError(
                f"the loss is computed in part {self.part_of.get(result, 0)}, but the last part is {parts - 1}: the "
                "loss must depend on the operations after the last stage_boundary"
            )
        crossings = self._crossings(by_part)
        if self.marks:
            self._warn(crossings)
        sent = [tuple(each.var for each in crossings if each.source == number) for number in range(parts)]
        made = [self._part(number, by_part[number], sent[number], parts) for number in range(parts)]
        return Cut(tuple(made), tuple(crossings))

    def _dependencies(self) -> dict[Var, int]:
        depends = {var: _PARAMETERS if var in self.parameters else _BATCH for var in self.inputs}
        depends.update(dict.fromkeys(self.loss.constants, 0))
        for equation in self.equations:
            of = 0
            for atom in equation.invars:
                of |= 0 if eq.is_literal(atom) else depends[atom]
            depends.update((var, of) for var in equation.outvars)
        return depends

    def _is_fixed(self, equation: Equation) -> bool:
        return equation.primitive is boundary_p or self.depends[equation.outvars[0]] == _BOTH

    # ---- which part

    def _by_marks(self, fixed: Sequence[Equation], parts: int) -> list[int]:
        """Return the part of each equation. If there are more marks than needed, use those that balance the costs."""
        if len(self.marks) < parts - 1:
            places = "".join(f"\n  {eq.place(mark)}" for mark in self.marks)
            raise PipelineError(
                f"{len(self.marks)} stage_boundary make {len(self.marks) + 1} parts, but the schedule has {parts}; "
                f"the marks are at{places}"
            )
        pieces, piece = [], 0
        for equation in fixed:
            pieces.append(piece)
            piece += equation.primitive is boundary_p
        costs = [0.0] * (piece + 1)
        for equation, piece in zip(fixed, pieces, strict=True):
            costs[piece] += flops(equation)
        starts = cut_evenly(costs, [0.0] * len(costs), parts)
        return [sum(start <= piece for start in starts) for piece in pieces]

    def _by_costs(self, fixed: Sequence[Equation], parts: int) -> list[int]:
        if len(fixed) < parts:
            raise PipelineError(
                "the loss function has too few operations that depend on both the parameters and the batch: "
                f"{len(fixed)} for {counted(parts, 'part')}"
            )
        index = {var: i for i, equation in enumerate(fixed) for var in equation.outvars}
        last = dict.fromkeys(index, -1)
        for i, equation in enumerate(fixed):
            for var in self._needs([equation]):
                if var in index:
                    last[var] = max(last[var], i)
        changes = [0.0] * (len(fixed) + 1)
        for var, use in last.items():
            if use > index[var]:
                changes[index[var] + 1] += nbytes(var.aval)
                changes[use + 1] -= nbytes(var.aval)
        crossing = [sum(changes[: i + 1]) for i in range(len(fixed))]
        starts = cut_evenly([flops(each) for each in fixed], crossing, parts)
        return [sum(start <= i for start in starts) for i in range(len(fixed))]

    def _keep_reductions_with_their_parameters(self, by_part: list[list[Equation]]) -> None:
        """Compute small values that depend only on large parameters in a part that has these, and send the values."""
        reductions = [each for each in self.equations if self._reduces(each)]
        stops = {var for each in reductions for var in each.outvars}
        homes: dict[Var, int] = {}
        users: dict[Var, int] = {}
        for number, equations in enumerate(by_part):
            for var in self._needs(equations, stops):
                homes.setdefault(var, number)
            for var in self._needs(equations):
                users.setdefault(var, number)
        for equation in reductions:
            of = [homes[var] for var in self._needs([equation]) if var in homes]
            first = min((users[var] for var in self._reached(equation) if var in users), default=len(by_part) - 1)
            number = min(min(of, default=first), first)
            by_part[number].append(equation)
            self.part_of.update((var, number) for var in equation.outvars)

    def _reduces(self, equation: Equation) -> bool:
        if self.depends[equation.outvars[0]] != _PARAMETERS:
            return False
        taken = sum(nbytes(atom.aval) for atom in equation.invars)
        return taken > _MUCH_LESS * sum(nbytes(var.aval) for var in equation.outvars)

    def _reached(self, equation: Equation) -> set[Var]:
        """Return the outputs of the equation and all values that are computed from them without the batch."""
        found = set(equation.outvars)
        for each in self.equations:
            if not self._is_fixed(each) and any(atom in found for atom in each.invars if not eq.is_literal(atom)):
                found.update(each.outvars)
        return found

    def _needs(self, equations: Iterable[Equation], stops: Iterable[Var] = ()) -> dict[Var, None]:
        """Return the values that these equations use, directly or through equations that belong to no part.

        The search does not continue beyond `stops`.
        """
        stops = set(stops)
        found: dict[Var, None] = {}
        left = [atom for each in equations for atom in each.invars if not eq.is_literal(atom)]
        while left:
            var = left.pop()
            if var in found:
                continue
            found[var] = None
            maker = self.maker.get(var)
            if maker is not None and var not in stops and var not in self.part_of and not self._is_fixed(maker):
                left += [atom for atom in maker.invars if not eq.is_literal(atom)]
        return found

    # ---- what crosses

    def _crossings(self, by_part: Sequence[Sequence[Equation]]) -> list[Crossing]:
        targets: dict[Var, list[int]] = {}
        for number, equations in enumerate(by_part):
            for var in self._needs(equations):
                if self.part_of.get(var, number) != number:
                    targets.setdefault(var, []).append(number)
        made = {var: i for i, var in enumerate(self.maker)}
        crossings = []
        for var in sorted(targets, key=lambda var: made[var]):
            user = next(
                equation
                for equation in (*by_part[targets[var][0]], *self.equations)
                if any(atom is var for atom in equation.invars)
            )
            crossings.append(Crossing(var, self.part_of[var], tuple(targets[var]), self._origin(var), eq.place(user)))
        return crossings

    def _origin(self, var: Var) -> str:
        maker = self.maker[var]
        if maker.primitive is not boundary_p:
            return eq.place(maker)
        marked = maker.invars[maker.outvars.index(var)]
        return eq.place(self.maker.get(marked, maker))

    def _warn(self, crossings: Sequence[Crossing]) -> None:
        marked = {var for mark in self.marks for var in mark.outvars}
        for each in crossings:
            if each.var not in marked and self.depends[each.var] == _BOTH:
                warnings.warn(
                    f"a value crosses between parts without a stage_boundary: {each}. It is sent, and kept until then; "
                    "if that is intended, mark it using stage_boundary((x, value))",
                    stacklevel=2,
                )

    def _part(self, number: int, equations: Sequence[Equation], sent: tuple[Var, ...], parts: int) -> ModelPart:
        outputs = (*sent, *(self.loss.outputs[:1] if number == parts - 1 else ()))
        others = [var for var, part in self.part_of.items() if part != number]
        computation = self.loss.cut(outputs, others)
        numbers = {var: i for i, var in enumerate(self.inputs)}
        count = len(self.parameters)
        taken = [numbers[var] for var in computation.inputs if var in numbers]
        return ModelPart(
            computation,
            tuple(i for i in taken if i < count),
            tuple(i - count for i in taken if i >= count),
            tuple(var for var in computation.inputs if var not in numbers),
            sent,
            sum(map(flops, equations)),
        )


def _warn_of_effects(equations: Sequence[Equation]) -> None:
    """Warn about equations with effects but without outputs, which no part contains."""
    for equation in equations:
        if equation.effects and not equation.outvars:
            warnings.warn(
                f"the pipeline omits {equation.primitive.name} at {eq.place(equation)}, because the loss does not "
                "depend on it",
                stacklevel=2,
            )


def _refuse_hidden_marks(equation: Equation) -> None:
    for mark in marks_inside(equation):
        raise PipelineError(
            f"the stage_boundary at {eq.place(mark)} is inside {equation.primitive.name} at {eq.place(equation)}, "
            "which JAX treats as one computation: move the mark outside"
        )


def marks_inside(equation: Equation) -> Iterator[Equation]:
    """Yield the marks in the jaxprs that an equation runs."""
    for jaxpr in eq.inner(equation):
        for each in jaxpr.eqns:
            if each.primitive is boundary_p:
                yield each
            yield from marks_inside(each)


def flops(equation: Any) -> float:
    """Return the operations of a product, of a convolution or of inner jaxprs; for others, one per output element."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2.0 * _size(equation.outvars[0].aval) * math.prod(int(left[d]) for d in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(equation.outvars[0].aval) * float(math.prod(kernel) / outputs)
    inside = [sum(map(flops, each.eqns)) for each in eq.inner(equation)]
    if not inside:
        return float(sum(_size(var.aval) for var in equation.outvars))
    if name == "cond":
        return max(inside)
    return sum(inside) * (params["length"] if name == "scan" else 1)


def _size(aval: Any) -> int:
    return int(math.prod(getattr(aval, "shape", ())))


def cut_evenly(costs: Sequence[float], crossing: Sequence[float], parts: int) -> list[int]:
    """Return the indices at which a list of items is cut into parts.

    `crossing[i]` are the bytes that cross a cut before item i. Among the cuts whose costliest part costs at most
    `SLACK` times that of the most even cut, this is one with the fewest crossing bytes, and among these the most even.
    There must be at least as many items as parts.
    """
    count = len(costs)
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
    part = before[None, :] - before[:, None]  # from item i to before item j
    part[np.tril_indices(count + 1)] = np.inf
    worst = part[0].copy()
    for _ in range(parts - 1):
        worst = np.min(np.maximum(worst[:, None], part), axis=0)
    bound = SLACK * float(worst[count])
    # Less than one byte in total, so that evenness decides only among cuts with equal crossing bytes.
    toll = np.where(part <= bound, 0.5 / parts * (np.minimum(part, bound) / max(bound, 1.0)) ** 2, np.inf)
    toll[1:count] += np.asarray(crossing, float)[1:, None]
    least = toll[0].copy()
    origins = []
    for _ in range(parts - 1):
        ways = least[:, None] + toll
        origins.append(np.argmin(ways, axis=0))
        least = np.min(ways, axis=0)
    ends = [count]
    for origin in reversed(origins):
        ends.append(int(origin[ends[-1]]))
    starts = ends[1:][::-1]
    assert all(a < b for a, b in pairwise([0, *starts, count]))
    return starts
