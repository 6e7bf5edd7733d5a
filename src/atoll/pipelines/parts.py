"""What a stage computes of its part: forward, backward, and the halves of backward, as computations. Nothing runs here.

Forward keeps what JAX's own `vjp` keeps for backward, so `jax.checkpoint` decides what is computed again. Of that, what
depends on parameters alone (a cast of them, for instance) is computed again from these: not one for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from atoll.pipelines import equations as eq
from atoll.pipelines.computation import Computation, is_inexact, structure, trace
from atoll.pipelines.pipeline_cut import Part


@dataclass(frozen=True)
class Derivative:
    """A part and its derivative. Inputs of the part are those of `Part.computation`, flat.

    `forward` takes them, and gives what the part sends (the last one: the loss, too) and then what is `kept`.
    `backward` takes those of the inputs that are numbered in `again`, what was kept, and a gradient of each of the
    outputs that are numbered in `outputs`; it gives gradients of the inputs that are numbered in `parameters`, and then
    in `received`.
    """

    forward: Computation
    backward: Computation
    again: tuple[int, ...]
    kept: int
    outputs: tuple[int, ...]
    parameters: tuple[int, ...]
    received: tuple[int, ...]

    def halves(self) -> tuple[Computation, Computation]:
        """Backward in two. The first gives the gradients of what was received, and then what the second needs of it,
        which takes the same arguments and these, and gives the gradients of the parameters."""
        weights, inputs = self.backward.outputs[: len(self.parameters)], self.backward.outputs[len(self.parameters) :]
        first = self.backward.cut(inputs)
        made = {var: None for equation in first.equations for var in equation.outvars}
        second = self.backward.cut(weights, made)
        between = tuple(var for var in second.inputs if var in made)
        every = self.backward.inputs
        return (
            Computation(first.equations, every, (*inputs, *between), first.constants),
            Computation(second.equations, (*every, *between), second.outputs, second.constants),
        )


def derivative(part: Part, trainable: Callable[[int], bool]) -> Derivative:
    """Traces the part and its derivative; `trainable` says of which parameters, by their number."""
    computation = part.computation
    inputs = computation.inputs
    given = len(part.parameters) + len(part.batch)
    parameters = tuple(i for i, number in enumerate(part.parameters) if trainable(number))
    received = tuple(i for i in range(given, len(inputs)) if is_inexact(inputs[i].aval))
    differentiated = (*parameters, *received)
    outputs = tuple(i for i, atom in enumerate(computation.outputs) if is_inexact(atom.aval))
    trees: list[Any] = []

    def forward(*arguments: Any) -> list[Any]:
        def of(*some: Any) -> tuple[list[Any], list[Any]]:
            every = list(arguments)
            for i, value in zip(differentiated, some, strict=True):
                every[i] = value
            results = computation(*every)
            return [results[i] for i in outputs], results

        _, pull, results = jax.vjp(of, *(arguments[i] for i in differentiated), has_aux=True)
        leaves, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return [*results, *leaves]

    whole, _ = trace(forward, *(structure(var.aval) for var in inputs))
    results, residuals = whole.outputs[: len(computation.outputs)], whole.outputs[len(computation.outputs) :]
    number = {var: i for i, var in enumerate(whole.inputs)}
    cheap = _made_of(whole, whole.inputs[: len(part.parameters)])
    variables = dict.fromkeys(atom for atom in residuals if not eq.is_literal(atom) and atom not in number)
    recomputed = [var for var in variables if var in cheap]
    kept = [var for var in variables if var not in cheap]
    again = whole.cut(recomputed)

    def backward(*arguments: Any) -> list[Any]:
        values = dict(zip(whole.inputs, arguments, strict=False))
        values.update(zip(recomputed, again(*(values[var] for var in again.inputs)), strict=True))
        values.update(zip(kept, arguments[len(inputs) :], strict=False))
        leaves = [jnp.asarray(atom.val, atom.aval.dtype) if eq.is_literal(atom) else values[atom] for atom in residuals]
        pull = jax.tree.unflatten(trees[-1], leaves)
        return list(pull(list(arguments[len(inputs) + len(kept) :])))

    first, second = len(inputs), len(inputs) + len(kept)
    avals = [var.aval for var in (*inputs, *kept)] + [computation.outputs[i].aval for i in outputs]
    every, _ = trace(backward, *map(structure, avals))
    back = every.cut(every.outputs)
    used = [i for i, var in enumerate(every.inputs) if var in set(back.inputs)]
    still = [kept[i - first] for i in used if first <= i < second]
    return Derivative(
        whole.cut((*results, *still)).taking(whole.inputs),
        back,
        tuple(i for i in used if i < first),
        len(still),
        tuple(outputs[i - second] for i in used if i >= second),
        parameters,
        received,
    )


def _made_of(computation: Computation, inputs: Sequence[Var]) -> set[Var]:
    """What is computed of these inputs and of constants alone."""
    found = {*inputs, *computation.constants}
    for equation in computation.equations:
        if all(eq.is_literal(atom) or atom in found for atom in equation.invars):
            found.update(equation.outvars)
    return found
