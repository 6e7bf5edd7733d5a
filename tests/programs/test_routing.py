"""Tests of `atoll.route` and `unroute` on one device of stock JAX: results, derivatives and errors."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import atoll
from tests.programs.routing_cases import by_themselves_and_in_a_program, check, parametrized
from tests.thoroughness import TIMES

pytestmark = pytest.mark.slow

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
CHOSEN = np.array([0, 1, 1, 0])


@functools.cache
def device() -> jax.Device:
    return jax.devices()[0]


@parametrized(1)
def test_rows_go_where_they_are_to_and_come_back(number: int) -> None:
    with jax.enable_x64(True):
        for found in by_themselves_and_in_a_program(number):
            check(number, found)


def _loss(rows: Any, weights: Any, parameters: Any) -> Any:
    blocks, routing = atoll.route(rows, np.array([[0, 1], [1, 1], [5, 0], [0, 0]]), to=[device()] * 2, capacity=2)
    blocks = [jnp.tanh(block @ each) for block, each in zip(blocks, parameters, strict=True)]
    return (atoll.unroute(blocks, routing, weights) ** 2).sum()


def test_derivatives_are_those_that_differences_give() -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        given = rng.standard_normal((4, 3)), rng.standard_normal((4, 2)), list(rng.standard_normal((2, 3, 3)))
        check_grads(_loss, given, order=1 if TIMES == 1 else 2, modes=["rev"])


def test_a_block_has_the_rows_in_order_and_then_zeros() -> None:
    blocks, routing = atoll.route(ROWS, CHOSEN, to=[device(), device()], capacity=3)
    np.testing.assert_array_equal(blocks[0], [ROWS[0], ROWS[3], np.zeros(3)])
    np.testing.assert_array_equal(blocks[1], [ROWS[1], ROWS[2], np.zeros(3)])
    assert routing.sizes.tolist() == [[2, 2]]


# Up to 15 destinations, places are counted instead of sorted, as in the other tests.
@pytest.mark.parametrize("count", [*(pytest.param(each, marks=pytest.mark.thorough) for each in (15, 40)), 16])
def test_any_number_of_destinations_have_the_rows_that_chose_them(count: int) -> None:
    rows = np.arange(300, dtype=np.float32)
    chosen = np.random.default_rng(0).integers(-1, count + 1, (300, 2))
    blocks, routing = atoll.route(rows, chosen, to=[device()] * count, capacity=12)
    for number, block in enumerate(blocks):
        wanted = np.concatenate([rows[chosen[:, choice] == number] for choice in range(2)])
        np.testing.assert_array_equal(block, np.resize(np.append(wanted[:12], np.zeros(12)), 12))
        assert routing.dropped[number] == max(0, len(wanted) - 12)


def test_first_choices_have_places_before_second_ones() -> None:
    chosen = np.array([[1, 0], [1, 0], [0, 1]])
    blocks, routing = atoll.route(ROWS[:3], chosen, to=[device(), device()], capacity=2)
    np.testing.assert_array_equal(blocks[0], [ROWS[2], ROWS[0]])
    np.testing.assert_array_equal(blocks[1], [ROWS[0], ROWS[1]])
    assert routing.dropped.tolist() == [1, 1]


def test_what_experts_make_of_places_without_a_row_is_not_looked_at() -> None:
    blocks, routing = atoll.route(ROWS, CHOSEN, to=[device(), device()], capacity=3)
    blocks = [jnp.where(block.sum(1, keepdims=True) == 0, jnp.nan, block) for block in blocks]
    np.testing.assert_array_equal(atoll.unroute(blocks, routing), ROWS)


def test_rows_may_come_back_in_another_shape_and_dtype() -> None:
    blocks, routing = atoll.route(ROWS, CHOSEN, to=[device(), device()], capacity=2)
    sums = atoll.unroute([block.sum(1).astype(jnp.int32) for block in blocks], routing)
    np.testing.assert_array_equal(sums, ROWS.sum(1).astype(np.int32))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"capacity": 0}, ValueError, "at least one row"),
        ({"capacity": -3}, ValueError, "capacity is -3"),
        ({"capacity": 1.5}, TypeError, "expected a number of rows"),
        ({"capacity": np.nan}, TypeError, "expected a number of rows"),
        ({"to": []}, ValueError, "at least one destination"),
        ({"to": ["gpu"]}, ValueError, "destination 0 is 'gpu'"),
        ({"destinations": CHOSEN.astype(np.float32)}, TypeError, "must be integers, not float32"),
        ({"destinations": np.full(4, np.nan)}, TypeError, "must be integers, not float64"),
        ({"destinations": CHOSEN > 0}, TypeError, "must be integers, not bool"),
        ({"destinations": CHOSEN[:3]}, ValueError, "one per row"),
        ({"destinations": CHOSEN.reshape(4, 1, 1)}, ValueError, "one per row"),
        ({"destinations": np.zeros((4, 0), int)}, ValueError, "one per row"),
        (
            {"rows": np.zeros((0, 3)), "destinations": np.zeros(0, int)},
            ValueError,
            "at least one row that is not empty",
        ),
        ({"rows": np.zeros((4, 0))}, ValueError, "at least one row that is not empty"),
        ({"rows": np.float32(1)}, ValueError, "at least one row that is not empty"),
        ({"overflow": "spill"}, ValueError, "overflow is"),
    ],
)
def test_what_cannot_be_routed_is_refused_by_name(changes: dict[str, Any], error: type, message: str) -> None:
    given = {"rows": ROWS, "destinations": CHOSEN, "to": [device(), device()], "capacity": 2} | changes
    with pytest.raises(error, match=message):
        atoll.route(**given)


def test_what_cannot_come_back_is_refused_by_name() -> None:
    blocks, routing = atoll.route(ROWS, CHOSEN, to=[device(), device()], capacity=2, overflow="keep")
    for given, message in (
        ((blocks[:1], routing), "1 block for 2 destinations"),
        (([blocks[0], blocks[1][:1]], routing), "block 1 has shape"),
        (([blocks[0], blocks[1].astype(jnp.int32)], routing), "block 1 is int32"),
        (([block[:, :2] for block in blocks], routing), "rows like those that were sent"),
        ((blocks, routing, np.ones((4, 1))), "weights of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            atoll.unroute(*given)
    with pytest.raises(TypeError, match="expected the Routing of"):
        atoll.unroute(blocks, blocks)  # type: ignore[arg-type]


def test_inside_of_jit_the_error_says_where_to_call_it() -> None:
    def f(rows: Any) -> Any:
        return atoll.route(rows, CHOSEN, to=[device()], capacity=4)[0][0]

    for transformed in (jax.jit(f), jax.vmap(f, in_axes=1), jax.checkpoint(f)):
        with pytest.raises(atoll.ProgramError, match="call it outside"):
            jax.grad(lambda rows, g=transformed: g(rows).sum())(ROWS)
