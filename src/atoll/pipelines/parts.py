"""The functions of a part: forward, backward, and the two halves of backward, as computations and as jit functions.

Forward keeps the residuals that JAX's `vjp` keeps for backward, so `jax.checkpoint` determines what is recomputed.
Residuals that depend only on parameters, such as a cast of them, are also recomputed, so that they are not stored once
per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from atoll.client.jax_internals import Var, leave_out_of_tracebacks
from atoll.pipelines import equations as eq
from atoll.pipelines.computation import Computation, is_inexact, structure, trace
from atoll.pipelines.pipeline_cut import ModelPart

leave_out_of_tracebacks(__file__)


@dataclass(frozen=True)
class Derivative:
    """A part and its derivative. The inputs are the flat inputs of `ModelPart.computation`.

    Attributes:
      forward: maps the inputs to the values that the part sends (for the last part, also the loss), followed by the
        `kept` residuals.
      backward: maps the inputs with the indices `again`, the residuals, and a gradient of each output with an index in
        `outputs`, to gradients of the inputs with the indices `parameters` and then `received`.
      kept: the number of residuals.
    """

    forward: Computation
    backward: Computation
    again: tuple[int, ...]
    kept: int
    outputs: tuple[int, ...]
    parameters: tuple[int, ...]
    received: tuple[int, ...]

    def halves(self) -> tuple[Computation, Computation]:
        """Split backward into two computations.

        The first computes the gradients of the received values, followed by intermediate values for the second. The
        second takes the same arguments followed by these values, and computes the gradients of the parameters.
        """
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


def derivative(part: ModelPart, trainable: Callable[[int], bool]) -> Derivative:
    """Trace the part and its derivative. `trainable` selects parameters by their numbers."""
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
    """Return the values that depend only on these inputs and on constants."""
    found = {*inputs, *computation.constants}
    for equation in computation.equations:
        if all(eq.is_literal(atom) or atom in found for atom in equation.invars):
            found.update(equation.outvars)
    return found


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Rename the function; programs and traces show the name."""
    function.__name__ = function.__qualname__ = name
    return function


class PartFunctions:
    """The jit functions of a part on its stage's mesh. Each call is one node of the program.

    `stage_shardings` are the shardings of the stage's parameters by number. With several micro-batches, the backward
    functions add to the sums of gradients that they take.
    """

    def __init__(
        self,
        number: int,
        part: ModelPart,
        derivative: Derivative,
        stage_shardings: Mapping[int, NamedSharding],
        microbatches: int,
    ) -> None:
        self.part = part
        self.derivative = derivative
        sent = len(part.sent)
        trained = [part.parameters[i] for i in derivative.parameters]
        shardings = [stage_shardings[i] for i in trained]
        accumulate = microbatches > 1
        donated = (0,) if accumulate else ()

        def gradients_of(given: Sequence[Sequence[Any]]) -> list[Any]:
            """Sum the gradients from the users of each output. The gradient of the loss, which has none, is 1."""
            return [
                sum(gradients[1:], gradients[0]) if gradients else jnp.ones((), computation.outputs[i].aval.dtype)
                for i, gradients in zip(derivative.outputs, given, strict=True)
            ]

        def added(sums: Sequence[Any], more: Sequence[Any]) -> list[Any]:
            return [a + b for a, b in zip(sums, more, strict=True)] if accumulate else list(more)

        computation = part.computation
        count = len(trained)

        def backward(sums: Any, inputs: Any, kept: Any, given: Any) -> Any:
            made = derivative.backward(*inputs, *kept, *gradients_of(given))
            return added(sums, made[:count]), made[count:]

        def whole(sums: Any, inputs: Any) -> Any:
            results = derivative.forward(*inputs)
            some = [inputs[i] for i in derivative.again]
            made = derivative.backward(
                *some, *results[len(results) - derivative.kept :], *gradients_of([()] * len(derivative.outputs))
            )
            return results[sent], added(sums, made[:count]), made[count:]

        first, second = derivative.halves()
        received = len(derivative.received)
        self.has_input_half = bool(first.outputs)

        def input_half(inputs: Any, kept: Any, given: Any) -> Any:
            made = first(*inputs, *kept, *gradients_of(given))
            return made[:received], made[received:]

        def weights_half(sums: Any, inputs: Any, kept: Any, given: Any, between: Any) -> Any:
            return added(sums, second(*inputs, *kept, *gradients_of(given), *between))

        def forward(inputs: Any) -> Any:
            made = derivative.forward(*inputs)
            cut = len(made) - derivative.kept
            return made[:cut], made[cut:]

        def name(what: str) -> str:
            return f"part_{number}_{what}"

        self.forward = jax.jit(named(forward, name("forward")))
        self.backward = jax.jit(
            named(backward, name("backward")), donate_argnums=donated, out_shardings=(shardings, None)
        )
        self.whole = jax.jit(
            named(whole, name("forward_backward")), donate_argnums=donated, out_shardings=(None, shardings, None)
        )
        self.input_half = jax.jit(named(input_half, name("backward_inputs")))
        self.weights_half = jax.jit(
            named(weights_half, name("backward_weights")), donate_argnums=donated, out_shardings=shardings
        )
