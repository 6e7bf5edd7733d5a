"""Cuts a traced loss function into the parts of a pipeline.

An equation that depends on parameters and on the batch belongs to the part in which it stands: between which marks
(`stage_boundary`), or between which of the places that `costs.cut_evenly` chose. What depends on parameters alone, or
on the batch alone (a cast, a mask, targets cut out of tokens), is computed in each part that needs it. So parameters
are where they are used. What reduces parameters to much less, such as a penalty on weights, stays with these.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jax.extend.core import Var

from atoll.errors import PipelineError
from atoll.pipelines import equations as eq
from atoll.pipelines.boundary import boundary_p
from atoll.pipelines.computation import Computation, Equation, nbytes
from atoll.pipelines.equation_costs import cut_evenly, flops
from atoll.quantities import human_bytes

_PARAMETERS, _BATCH = 1, 2
_BOTH = _PARAMETERS | _BATCH
_MUCH_LESS = 16


@dataclass(frozen=True)
class Part:
    """A part of the model. Its computation takes the parameters and leaves of the batch with these numbers, and the
    values that it receives, and gives those that it sends; the last part gives the loss."""

    computation: Computation
    parameters: tuple[int, ...]
    batch: tuple[int, ...]
    received: tuple[Var, ...]
    sent: tuple[Var, ...]
    flops: float


@dataclass(frozen=True)
class Crossing:
    """A value that parts get from another one."""

    var: Var
    source: int
    targets: tuple[int, ...]
    made: str  # where in the user's code
    used: str

    def __str__(self) -> str:
        to = ", ".join(map(str, self.targets))
        return (
            f"{self.var.aval.str_short(short_dtypes=True)} ({human_bytes(nbytes(self.var.aval))}) of part "
            f"{self.source} to part {to}: made at {self.made}; used at {self.used}"
        )


@dataclass(frozen=True)
class Cut:
    parts: tuple[Part, ...]
    crossings: tuple[Crossing, ...]


def cut(loss: Computation, parameters: int, parts: int) -> Cut:
    """Cuts the computation of a loss, the first so many of whose inputs are parameters, into so many parts.

    Raises PipelineError, and warns of values that cross without a mark, where there are marks.
    """
    return _Cutter(loss, parameters).cut(parts)


class _Cutter:
    def __init__(self, loss: Computation, parameters: int) -> None:
        for equation in loss.equations:
            _refuse_hidden_marks(equation)
        self.marks = [each for each in loss.equations if each.primitive is boundary_p]
        # A mark stays where nothing else of its part is needed: it says where the part ends.
        self.loss = loss.cut((*loss.outputs, *(var for mark in self.marks for var in mark.outvars)))
        _warn_of_effects(loss.equations)
        self.inputs = loss.inputs
        self.parameters = set(loss.inputs[:parameters])
        self.equations = self.loss.equations
        self.maker = {var: equation for equation in self.equations for var in equation.outvars}
        self.depends = self._dependencies()
        self.part_of: dict[Var, int] = {}  # of the values that belong to a part

    def cut(self, parts: int) -> Cut:
        fixed = [each for each in self.equations if self._is_fixed(each)]
        if not fixed:
            raise PipelineError("the loss function computes nothing of both the parameters and the batch")
        numbers = self._by_marks(fixed, parts) if self.marks else self._by_costs(fixed, parts)
        for equation, number in zip(fixed, numbers, strict=True):
            self.part_of.update((var, number) for var in equation.outvars)
        by_part: list[list[Equation]] = [[] for _ in range(parts)]
        for equation, number in zip(fixed, numbers, strict=True):
            by_part[number].append(equation)
        for number, equations in enumerate(by_part):
            if not any(each.primitive is not boundary_p for each in equations):
                raise PipelineError(
                    f"part {number} of {parts} computes nothing of both the parameters and the batch: the "
                    f"stage_boundary at {eq.place(self.marks[min(number, len(self.marks) - 1)])} leaves nothing to it"
                )
        self._keep_reductions_with_their_parameters(by_part)
        (result,) = self.loss.outputs[:1]
        if self.part_of.get(result) != parts - 1:
            raise PipelineError(
                f"the loss is computed in part {self.part_of.get(result, 0)}, and the last part is {parts - 1}: what "
                "stands behind the last stage_boundary does not lead to it"
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
        """Where there are more marks than needed, those are chosen whose parts cost alike."""
        if len(self.marks) < parts - 1:
            places = "".join(f"\n  {eq.place(mark)}" for mark in self.marks)
            raise PipelineError(
                f"{len(self.marks)} stage_boundary make {len(self.marks) + 1} parts, and the schedule has {parts}; "
                f"they are at{places}"
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
            raise PipelineError(f"the loss function has {len(fixed)} operations that can be cut, too few for {parts}")
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
        """A small value of large parameters alone is computed where these are, and sent."""
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
        """All that is computed of it without the batch, and itself."""
        found = set(equation.outvars)
        for each in self.equations:
            if not self._is_fixed(each) and any(atom in found for atom in each.invars if not eq.is_literal(atom)):
                found.update(each.outvars)
        return found

    def _needs(self, equations: Iterable[Equation], stops: Iterable[Var] = ()) -> dict[Var, None]:
        """The values that these equations use: of parts, inputs, and what belongs to no part, as far as the stops."""
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
                    f"a value crosses from part to part that no stage_boundary names: {each}. It is sent, and kept "
                    "until then; stage_boundary((x, value)) says that it is meant",
                    stacklevel=2,
                )

    def _part(self, number: int, equations: Sequence[Equation], sent: tuple[Var, ...], parts: int) -> Part:
        outputs = (*sent, *(self.loss.outputs[:1] if number == parts - 1 else ()))
        others = [var for var, part in self.part_of.items() if part != number]
        computation = self.loss.cut(outputs, others)
        numbers = {var: i for i, var in enumerate(self.inputs)}
        count = len(self.parameters)
        taken = [numbers[var] for var in computation.inputs if var in numbers]
        return Part(
            computation,
            tuple(i for i in taken if i < count),
            tuple(i - count for i in taken if i >= count),
            tuple(var for var in computation.inputs if var not in numbers),
            sent,
            sum(map(flops, equations)),
        )


def _warn_of_effects(equations: Sequence[Equation]) -> None:
    """What no result depends on is in no part."""
    for equation in equations:
        if equation.effects and not equation.outvars:
            warnings.warn(
                f"{equation.primitive.name} at {eq.place(equation)} is left out of the pipeline: the loss does not "
                "depend on it",
                stacklevel=2,
            )


def _refuse_hidden_marks(equation: Equation) -> None:
    for mark in marks_inside(equation):
        raise PipelineError(
            f"the stage_boundary at {eq.place(mark)} stands inside of {equation.primitive.name} at "
            f"{eq.place(equation)}, which JAX takes as one computation: put it outside, between two of them"
        )


def marks_inside(equation: Equation) -> Iterator[Equation]:
    """Of the jaxprs that it runs."""
    for jaxpr in eq.inner(equation):
        for each in jaxpr.eqns:
            if each.primitive is boundary_p:
                yield each
            yield from marks_inside(each)
