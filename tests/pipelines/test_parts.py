"""Tests of a part and its derivative: the values kept between forward and backward, and the two halves of backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll.pipelines.computation import structure, trace
from atoll.pipelines.parts import Derivative, derivative
from atoll.pipelines.pipeline_cut import cut
from tests.pipelines import models


def derived(function: Callable[..., Any], params: list[Any], batch: Any, parts: int = 1) -> list[Derivative]:
    traced, _ = trace(
        lambda *flat: function(flat[:-1], flat[-1]), *(structure(jax.typeof(each)) for each in (*params, batch))
    )
    made = cut(traced, len(params), parts)
    return [derivative(part, lambda number: jnp.issubdtype(params[number].dtype, jnp.inexact)) for part in made.parts]


def gradients(each: Derivative, inputs: list[Any], halves: bool) -> list[Any]:
    """Return the gradients of a part that returns the loss."""

    @jax.jit
    def both(*inputs: Any) -> list[Any]:
        made = each.forward(*inputs)
        given = [inputs[i] for i in each.again] + made[len(made) - each.kept :] + [jnp.ones((), made[0].dtype)]
        if not halves:
            return each.backward(*given)
        first, second = each.halves()
        between = first(*given)
        return [*second(*given, *between[len(each.received) :]), *between[: len(each.received)]]

    return list(both(*inputs))


WEIGHTS = [np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), np.eye(8, dtype=np.float32)]
ROWS = np.linspace(0, 1, 32, dtype=np.float32).reshape(4, 8)


def two_layers(params: Any, batch: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(batch @ params[0]) @ params[1]) ** 2)


@pytest.mark.parametrize("halves", [False, True])
def test_forward_and_backward_give_the_gradients_of_jax(halves: bool) -> None:
    (each,) = derived(two_layers, WEIGHTS, ROWS)
    wanted = jax.jit(jax.grad(two_layers))(WEIGHTS, ROWS)
    for one, other in zip(gradients(each, [*WEIGHTS, ROWS], halves), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("halves", [False, True])
def test_a_later_part_gives_the_gradients_of_what_it_received(halves: bool) -> None:
    def marked(params: Any, batch: Any) -> Any:
        h = jnp.tanh(batch @ params[0])
        return jnp.mean(jnp.tanh(models.stage_boundary(h) @ params[1]) ** 2)

    _, last = derived(marked, WEIGHTS, ROWS, 2)
    h = np.tanh(ROWS @ WEIGHTS[0])
    wanted = jax.jit(jax.grad(lambda w, h: jnp.mean(jnp.tanh(h @ w) ** 2), (0, 1)))(WEIGHTS[1], h)
    for one, other in zip(gradients(last, [WEIGHTS[1], h], halves), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_first_half_computes_no_gradients_of_weights() -> None:
    def marked(params: Any, batch: Any) -> Any:
        h = models.stage_boundary(jnp.tanh(batch @ params[0]))
        for each in params[1:]:
            h = jnp.tanh(h @ each)
        return jnp.mean(h**2)

    _, last = derived(marked, [WEIGHTS[0]] * 4, ROWS, 2)
    first, second = last.halves()
    products = [sum(e.primitive.name == "dot_general" for e in each.equations) for each in (first, second)]
    assert products == [3, 3]  # as many in each, since none is computed twice


def test_inputs_are_not_kept_twice() -> None:
    (each,) = derived(lambda params, batch: jnp.sum((batch @ params[0]) @ params[1]), WEIGHTS, ROWS)
    assert each.again == (1, 2)  # no gradient needs the first weights
    assert each.kept == 1  # the value between the products


def test_what_is_made_of_parameters_alone_is_computed_again() -> None:
    def half(params: Any, batch: Any) -> Any:
        first, second = (each.astype(jnp.bfloat16) for each in params)
        return jnp.sum((batch.astype(jnp.bfloat16) @ first) @ second).astype(jnp.float32)

    (each,) = derived(half, WEIGHTS, ROWS)
    kept = [atom.aval.shape for atom in each.forward.outputs[1:]]
    assert kept.count((8, 8)) == 0


def test_a_checkpoint_keeps_its_inputs_alone() -> None:
    def checkpointed(params: Any, batch: Any) -> Any:
        return jax.checkpoint(two_layers)(params, batch)

    (plain,), (each,) = derived(two_layers, WEIGHTS, ROWS), derived(checkpointed, WEIGHTS, ROWS)
    assert plain.kept > 0
    assert each.kept == 0


def test_parameters_that_are_no_floating_point_numbers_have_no_gradients() -> None:
    def shifted(params: Any, batch: Any) -> Any:
        return jnp.mean((batch @ params[0] + params[1]) ** 2)

    (each,) = derived(shifted, [WEIGHTS[0], np.int32(3)], ROWS)
    assert each.parameters == (0,)
