"""Tests of cutting a loss function: by marks, by cost, the place of each parameter, and the errors of wrong cuts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll.errors import PipelineError
from atoll.pipelines.boundary import stage_boundary
from atoll.pipelines.computation import structure, trace
from atoll.pipelines.pipeline_cut import Cut, cut, cut_evenly
from tests.pipelines import models

BATCH = jax.ShapeDtypeStruct((2, 9), np.int32)


def cut_up(function: Callable[..., Any], params: Any, batch: Any, parts: int) -> tuple[Cut, list[str]]:
    """Return the cut, and the names of the parameters by number."""
    leaves, tree = jax.tree.flatten_with_path(params)
    inputs, batch_tree = jax.tree.flatten(batch)
    traced, _ = trace(
        lambda *flat: function(tree.unflatten(flat[: len(leaves)]), batch_tree.unflatten(flat[len(leaves) :])),
        *(structure(jax.typeof(leaf)) for _, leaf in leaves),
        *inputs,
    )
    return cut(traced, len(leaves), parts), [jax.tree_util.keystr(path) for path, _ in leaves]


def run(made: Cut, params: Any, batch: Any) -> Any:
    """Compute the loss, part by part."""
    parameters, leaves = jax.tree.leaves(params), jax.tree.leaves(batch)
    values: dict[Any, Any] = {}
    for part in made.parts:
        results = part.computation(
            *(parameters[i] for i in part.parameters),
            *(leaves[i] for i in part.batch),
            *(values[var] for var in part.received),
        )
        values.update(zip(part.sent, results, strict=False))
    return results[-1]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_parts_one_after_another_give_the_loss(parts: int, marked: bool) -> None:
    params, batch = models.first_params(), models.first_batch()
    function = functools.partial(models.loss, marked=marked)
    made, _ = cut_up(function, params, BATCH, parts)
    assert float(run(made, params, batch)) == pytest.approx(float(models.loss(params, batch)), rel=1e-6)


@pytest.mark.parametrize("marked", [False, True])
def test_parameters_are_on_the_parts_that_use_them(marked: bool) -> None:
    made, names = cut_up(functools.partial(models.loss, marked=marked), models.first_params(), BATCH, 2)
    first, second = ([names[i] for i in part.parameters] for part in made.parts)
    assert first == ["['embedding']", *(f"['layers'][{i}]['{name}']" for i in (0, 1) for name in ("down", "up"))]
    assert second == ["['embedding']", *(f"['layers'][{i}]['{name}']" for i in (2, 3) for name in ("down", "up"))]


def test_without_marks_the_parts_cost_alike_and_only_the_residual_stream_crosses() -> None:
    made, _ = cut_up(models.loss, models.first_params(8), BATCH, 4)
    costs = [part.flops for part in made.parts]
    assert max(costs) < 1.35 * min(costs)
    assert [each.var.aval.shape for each in made.crossings] == [(2, 8, models.WIDTH)] * 3


def test_of_more_marks_than_needed_those_are_taken_that_balance_the_parts() -> None:
    made, _ = cut_up(functools.partial(models.loss, marked=True), models.first_params(6), BATCH, 3)
    costs = [part.flops for part in made.parts]
    assert max(costs) < 1.5 * min(costs)


def test_what_depends_on_the_batch_alone_is_computed_where_it_is_used() -> None:
    made, _ = cut_up(functools.partial(models.loss, marked=True), models.first_params(), BATCH, 4)
    assert [part.batch for part in made.parts] == [(0,), (), (), (0,)]


def test_a_cast_of_parameters_is_computed_where_they_are_used() -> None:
    def half(params: Any, batch: Any) -> Any:
        return models.loss(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch, marked=True)

    made, names = cut_up(half, models.first_params(), BATCH, 4)
    assert [names[i] for i in made.parts[1].parameters] == ["['layers'][1]['down']", "['layers'][1]['up']"]
    assert len(made.crossings) == 3


def test_a_penalty_on_weights_stays_with_them_and_its_number_is_sent() -> None:
    def with_penalty(params: Any, batch: Any) -> Any:
        penalty = sum(jnp.sum(each**2) for each in jax.tree.leaves(params["layers"]))
        return models.loss(params, batch, marked=True) + 1e-4 * penalty

    made, names = cut_up(with_penalty, models.first_params(), BATCH, 2)
    assert [names[i] for i in made.parts[1].parameters if "layers'][0]" in names[i]] == []
    assert {each.var.aval.shape for each in made.crossings} == {(), (2, 8, models.WIDTH)}
    params, batch = models.first_params(), models.first_batch()
    assert float(run(made, params, batch)) == pytest.approx(float(with_penalty(params, batch)), rel=1e-6)


def skipping(params: Any, batch: Any) -> Any:
    h = first = batch @ params[0]
    for each in params[1:]:
        h = stage_boundary(jnp.tanh(h @ each))
    return jnp.mean((h + first) ** 2)


def test_a_value_that_skips_parts_is_sent_and_told_of_by_size_and_line() -> None:
    params = [np.ones((8, 8), np.float32)] * 3
    with pytest.warns(UserWarning, match="without a stage_boundary") as warned:
        made, _ = cut_up(skipping, params, jax.ShapeDtypeStruct((4, 8), np.float32), 3)
    text = str(warned[0].message)
    assert re.search(
        r"f32\[4,8\] \(128 B\) of part 0 to part 2: made at .*_pipeline_cut.py:\d+.*; used at .*_pipeline_cut.py",
        text,
    )
    assert made.crossings[0].targets == (2,)


def test_a_mark_may_name_several_values() -> None:
    def both(params: Any, batch: Any) -> Any:
        h = first = batch @ params[0]
        h, first = stage_boundary((jnp.tanh(h), first))
        return jnp.mean((h @ params[1] + first) ** 2)

    made, _ = cut_up(both, [np.ones((8, 8), np.float32)] * 2, jax.ShapeDtypeStruct((4, 8), np.float32), 2)
    assert len(made.crossings) == 2


def test_layer_names_of_the_model_are_in_what_is_told() -> None:
    def named(params: Any, batch: Any) -> Any:
        with jax.named_scope("encoder"):
            h = jnp.tanh(batch @ params[0])
        return jnp.mean(stage_boundary(h) @ params[1])

    made, _ = cut_up(named, [np.ones((8, 8), np.float32)] * 2, jax.ShapeDtypeStruct((4, 8), np.float32), 2)
    assert "made at encoder, " in str(made.crossings[0])


def test_too_few_marks_are_refused_with_their_lines() -> None:
    with pytest.raises(PipelineError, match=r"3 stage_boundary make 4 parts, but the schedule has 5.*\n.*models.py"):
        cut_up(functools.partial(models.loss, marked=True), models.first_params(), BATCH, 5)


def test_a_mark_inside_of_a_checkpoint_or_a_scan_is_refused() -> None:
    def hidden(params: Any, batch: Any) -> Any:
        h = jax.checkpoint(lambda h: stage_boundary(h @ params[0]))(batch)
        return jnp.mean(h @ params[1])

    with pytest.raises(PipelineError, match=r"stage_boundary at .*test_pipeline_cut.py.* is inside remat2? at"):
        cut_up(hidden, [np.ones((8, 8), np.float32)] * 2, jax.ShapeDtypeStruct((4, 8), np.float32), 2)


def test_a_mark_that_leaves_nothing_to_a_part_is_refused() -> None:
    def early(params: Any, batch: Any) -> Any:
        h = stage_boundary(batch)
        return jnp.mean(stage_boundary(h @ params[0]) @ params[1])

    with pytest.raises(PipelineError, match="part 0 of 3 is empty"):
        cut_up(early, [np.ones((8, 8), np.float32)] * 2, jax.ShapeDtypeStruct((4, 8), np.float32), 3)


def test_a_loss_without_parameters_is_refused() -> None:
    with pytest.raises(PipelineError, match="depends on both the parameters and the batch"):
        cut_up(lambda params, batch: jnp.mean(batch), [np.ones(3)], jax.ShapeDtypeStruct((4, 8), np.float32), 1)


def test_a_print_is_left_out_and_told_of() -> None:
    def printing(params: Any, batch: Any) -> Any:
        h = batch @ params[0]
        jax.debug.print("{}", h)
        return jnp.mean(h)

    with pytest.warns(UserWarning, match=r"the pipeline omits debug.* at .*test_pipeline_cut.py"):
        cut_up(printing, [np.ones((8, 8), np.float32)], jax.ShapeDtypeStruct((4, 8), np.float32), 1)


def test_a_boundary_is_the_identity_under_transformations() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(stage_boundary(jnp.sin(x)) ** 2)

    def plain(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x) ** 2)

    x = jnp.arange(4.0)
    assert jax.jit(f)(x) == plain(x)
    assert np.array_equal(jax.grad(f)(x), jax.grad(plain)(x))
    assert np.array_equal(jax.vmap(jax.grad(f))(x[None]), jax.grad(plain)(x)[None])
    assert np.array_equal(jax.linear_transpose(stage_boundary, x)(x)[0], x)


def test_costs_are_cut_evenly_and_where_little_crosses() -> None:
    assert cut_evenly([1] * 8, [9] * 8, 4) == [2, 4, 6]
    assert cut_evenly([1] * 8, [9, 9, 9, 9, 9, 1, 9, 9], 2) == [5]  # slightly uneven, but with much smaller transfers
    assert cut_evenly([1] * 8, [9, 1, 9, 9, 9, 9, 9, 9], 2) == [4]  # too uneven
    assert cut_evenly([5], [0], 1) == []
