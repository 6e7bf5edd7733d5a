"""Tests of the optimizer's update, divided between stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from atoll.errors import PipelineError
from atoll.pipelines.computation import structure, trace
from atoll.pipelines.optimizer import Update, cut_update, tracer_of

PARAMS = [np.linspace(0, 1, n * n, dtype=np.float32).reshape(n, n) for n in (3, 4, 5)]
GRADIENTS = [np.cos(each) for each in PARAMS]
OWNERS = [0, 1, 2]


def cut_up(optimizer: Any, params: list[Any] | None = None) -> tuple[Update, Any, Any]:
    params = PARAMS if params is None else params
    state = optimizer.init(params)
    leaves, tree = jax.tree.flatten(state)
    types = [structure(jax.typeof(each)) for each in params]
    update = tracer_of(optimizer, list, tree, microbatches=1)
    traced, _ = trace(update, types, types, [structure(jax.typeof(each)) for each in leaves])
    return cut_update(traced, OWNERS), leaves, tree


def run(update: Update, leaves: list[Any]) -> dict[int, Any]:
    """Run all rounds. Each stage can only read its own parameters and the values that others have exported."""
    values: dict[Any, Any] = dict(zip(update.inputs, [*GRADIENTS, *PARAMS, *leaves], strict=True))
    owner = {var: OWNERS[i % 3] for i, var in enumerate(update.inputs[:6])}
    results: dict[int, Any] = {}
    for each in update.rounds:
        assert all(owner.get(var, each.stage) == each.stage for var in each.computation.inputs)
        made = each.computation(*(values[var] for var in each.computation.inputs))
        values.update(zip(each.exports, made, strict=False))
        results.update(zip(each.results, made, strict=False))
    return results


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1),
        optax.adamw(1e-2),
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
        optax.masked(optax.adam(1e-2), [True, False, True]),
    ],
)
def test_an_update_in_rounds_is_that_of_the_whole_tree(optimizer: Any) -> None:
    update, leaves, tree = cut_up(optimizer)
    updates, state = optimizer.update(GRADIENTS, tree.unflatten(leaves), PARAMS)
    wanted = [*optax.apply_updates(PARAMS, updates), *jax.tree.leaves(state)]
    results = run(update, leaves)
    for i, each in enumerate(wanted):
        np.testing.assert_allclose(results[i], each, rtol=1e-6)


def test_an_optimizer_that_keeps_to_each_parameter_has_one_round_a_stage() -> None:
    update, _, _ = cut_up(optax.adam(1e-2))
    assert [each.stage for each in update.rounds] == [0, 1, 2]
    # The count is on every stage, and moments are on their parameters' stages.
    assert update.stages == (None, 0, 1, 2, 0, 1, 2)
    assert update.like == (None, 0, 1, 2, 0, 1, 2)


def test_a_global_norm_is_summed_over_stages() -> None:
    update, _, _ = cut_up(optax.clip_by_global_norm(0.5))
    sent = [var.aval.shape for each in update.rounds for var in each.exports]
    assert sent == [()] * 4  # the sum of each stage, and the norm


def test_an_optimizer_that_brings_large_values_of_stages_together_is_refused() -> None:
    def mix(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        flat = jnp.concatenate([each.ravel() for each in updates])
        return [each - flat[0] for each in updates], state

    large = [np.zeros((200, 200), np.float32)] * 3
    with pytest.raises(PipelineError, match=r"parameters of stages \d and \d at .*test_optimizer.py.*156.2 KiB"):
        cut_up(optax.GradientTransformation(lambda params: (), mix), large)
