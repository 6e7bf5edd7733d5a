"""The jit functions of a part, on its stage's mesh: each is one node of the program, for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from atoll.client.jax_internals import leave_out_of_tracebacks
from atoll.pipelines.parts import Derivative
from atoll.pipelines.pipeline_cut import Part
from atoll.pipelines.pipeline_plan import StagePlan

leave_out_of_tracebacks(__file__)


def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, under the name that programs and traces show."""
    function.__name__ = function.__qualname__ = name
    return function


class PartFunctions:
    """The jit functions of a part, on its stage's mesh."""

    def __init__(self, number: int, part: Part, derivative: Derivative, stage: StagePlan, microbatches: int) -> None:
        self.part = part
        self.derivative = derivative
        sent = len(part.sent)
        trained = [part.parameters[i] for i in derivative.parameters]
        shardings = [stage.parameters[i] for i in trained]
        accumulate = microbatches > 1
        donated = (0,) if accumulate else ()

        def gradients_of(given: Sequence[Sequence[Any]]) -> list[Any]:
            """For each output: the sum of what its users gave; the loss has none but itself."""
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
