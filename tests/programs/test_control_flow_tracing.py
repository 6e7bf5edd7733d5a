"""Tests of what `atoll.cond`, `switch` and `while_loop` record, on stock CPU devices without a cluster."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import atoll
from atoll.errors import ProgramError
from atoll.ir.program import Call, Loop, Program, Switch, Transfer
from tests.programs.test_tracing import at, body, kinds

VECTOR = np.arange(8.0, dtype=np.float32)
double = jax.jit(lambda x: x * 2)
positive = jax.jit(lambda x: x.sum() > 0)


def here(x: Any) -> Any:
    return double(x)


def there(x: Any) -> Any:
    return jax.device_put(jnp.sin(jax.device_put(x, at(1))), at(0))


def vector() -> Any:
    return jax.device_put(VECTOR, at(0))


def last(program: Program, kind: type[Any]) -> Any:
    assert isinstance(program.nodes[-1], kind)
    return program.nodes[-1]


def test_a_choice_over_devices_is_one_node_with_a_program_for_each_branch() -> None:
    switch = last(body(lambda x: atoll.cond(positive(x), here, there, x), vector()), Switch)
    assert [[type(node) for node in branch.nodes] for branch in switch.branches] == [
        [Transfer, Call, Transfer],  # false
        [Call],  # true
    ]
    assert [branch.name for branch in switch.branches] == ["false_fun", "true_fun"]


def test_a_choice_on_one_mesh_is_one_compiled_function() -> None:
    program = body(lambda x: atoll.switch(positive(x).astype(int), [here, jnp.sin, lambda x: x], x), vector())
    assert kinds(program) == ["Call", "Call", "Call"]
    assert kinds(body(lambda x: atoll.while_loop(positive, jnp.sin, x), vector())) == ["Call"]


def test_a_number_on_another_mesh_goes_to_where_the_functions_are() -> None:
    program = body(lambda x, p: atoll.cond(p, here, jnp.sin, x), vector(), jax.device_put(True, at(3)))
    assert kinds(program) == ["Transfer", "Call"]


def test_functions_may_use_values_and_arrays_from_around_them() -> None:
    weights = jax.device_put(VECTOR + 1, at(1))

    def function(x: Any) -> Any:
        y = double(x)
        return atoll.cond(positive(x), lambda: there(y) * 2, lambda: jax.device_put(weights * 3, at(0)))

    program = body(function, vector())
    switch = last(program, Switch)
    assert len(program.arguments) == 2 + sum(1 for spec in program.arguments if not spec.shape)  # numbers
    assert all(len(branch.arguments) == len(switch.inputs) - 1 for branch in switch.branches)


def test_what_a_loop_returns_as_it_is_is_not_carried() -> None:
    def step(carry: Any) -> Any:
        x, kept, count = carry
        return there(x) + kept, kept, count + 1

    start = (vector(), vector() + 1, 0)
    loop = last(body(lambda x: atoll.while_loop(lambda carry: carry[2] < 5, step, x), start), Loop)
    assert loop.constants >= 1
    assert len(loop.outputs) == 2
    assert len(loop.body.arguments) == len(loop.condition.arguments) == loop.constants + 2


def test_initial_values_go_to_where_the_body_puts_them_and_get_its_types() -> None:
    def step(carry: Any) -> Any:
        x, scale = carry
        return there(x), scale * jnp.float32(2)

    outputs = last(body(lambda x: atoll.while_loop(lambda c: c[1] < 5, step, (x, 1)), VECTOR), Loop).outputs
    assert [(spec.dtype, spec.sharding.devices) for spec in outputs] == [("float32", (0,)), ("float32", (0,))]


def test_numbers_of_python_take_the_types_that_arrays_have_elsewhere() -> None:
    """This also holds if one of them is another operand."""

    def with_number(x: Any) -> Any:
        return there(x) * 3.0, 3.0

    def with_array(x: Any) -> Any:
        return there(x), x.sum()

    switch = last(body(lambda x: atoll.cond(positive(x), with_number, with_array, x), vector()), Switch)
    assert [spec.dtype for spec in switch.outputs] == ["float32", "float32"]

    def step(carry: Any) -> Any:
        return there(carry[0]), carry[1] + 0.5

    loop = last(body(lambda x: atoll.while_loop(lambda c: c[1] < 5, step, (x, 0)), vector()), Loop)
    assert [spec.dtype for spec in loop.outputs] == ["float32", "float64"]


def test_a_program_may_look_at_a_choice_before_it_runs() -> None:
    text = atoll.program(lambda x: atoll.cond(positive(x), here, there, x) + 1).lower(vector()).as_text()
    assert "which reports an index" in text
    assert "atoll.program @true_fun" in text


def test_a_number_that_python_knows_chooses_at_once() -> None:
    assert kinds(body(lambda x: atoll.cond(True, here, there, x), vector())) == ["Call"]
    assert kinds(body(lambda x: atoll.switch(7, [here, there], x), vector())) == ["Transfer", "Call", "Transfer"]


def test_on_another_backend_python_chooses() -> None:
    x = vector()
    np.testing.assert_array_equal(atoll.cond(positive(x), here, there, x), VECTOR * 2)
    np.testing.assert_array_equal(atoll.switch(positive(x).astype(int) - 5, [there, here], x), np.asarray(jnp.sin(x)))
    count, _ = atoll.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, there(c[1])), (0, x))
    assert count == 3


def test_functions_with_effects_are_called_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    def loud(x: Any) -> Any:
        jax.debug.print("chosen {}", x[0])
        return there(x)

    program = atoll.program(lambda x: atoll.cond(positive(x), loud, here, x))
    jax.block_until_ready(program(vector()))
    jax.effects_barrier()
    assert "chosen 0.0" in capfd.readouterr().out
    with pytest.raises(ProgramError, match="has effects, and depends on data"):
        program.lower(vector())


def test_under_transformations_it_is_that_of_jax_on_one_mesh() -> None:
    def choose(x: Any) -> Any:
        return atoll.cond(x.sum() > 0, lambda x: x**2, lambda x: -x, x).sum()

    np.testing.assert_array_equal(jax.grad(choose)(vector()), 2 * VECTOR)
    np.testing.assert_array_equal(jax.jit(jax.grad(choose))(-vector()), np.full(8, -1.0))
    np.testing.assert_array_equal(jax.vmap(choose)(jnp.stack([vector(), -vector()])), [140.0, 28.0])


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (
            lambda x: atoll.cond(
                positive(x), lambda x: {"a": there(x)}, lambda x: {"a": there(x).astype(jnp.int32)}, x
            ),
            TypeError,
            r"output\['a'\] of false_fun is int32\[8\], and of true_fun float32\[8\]",
        ),
        (
            lambda x: atoll.cond(positive(x), lambda x: (there(x), x), there, x),
            TypeError,
            "must return the same tree, but false_fun returns",
        ),
        (
            lambda x: atoll.cond(positive(x), lambda x: {"y": jax.device_put(x, at(1))}, lambda x: {"y": x}, x),
            TypeError,
            r"equal shardings, but output\['y'\] of false_fun is .* with jax.device_put",
        ),
        (
            lambda x: atoll.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jax.device_put(c[1], at(1))), (0, x)),
            TypeError,
            r"output\[1\] of body_fun is .* put one of them where the other is",
        ),
        (
            lambda x: atoll.while_loop(positive, lambda x: (x, x), x),
            TypeError,
            "must return the tree that it takes",
        ),
        (lambda x: atoll.while_loop(lambda x: x > 0, there, x), TypeError, "must return a boolean scalar"),
        (lambda x: atoll.while_loop(lambda x: x.sum(), there, x), TypeError, "must return a boolean scalar"),
        (lambda x: atoll.cond(x, there, here, x), TypeError, "pred of atoll.cond must be a scalar"),
        (lambda x: atoll.switch(x[0], [there, here], x), TypeError, "index of atoll.switch must be an integer"),
        (lambda x: atoll.switch(0, [], x), ValueError, "at least one branch"),
        (
            lambda x: atoll.cond(positive(x), lambda x: atoll.cond(positive(x), there, here, x), here, x),
            ProgramError,
            "is inside a branch or loop of another",
        ),
        (lambda x: atoll.cond(positive(x), lambda x: "text", there, x), TypeError, ""),
    ],
)
def test_what_cannot_be_chosen_so_is_refused_with_the_reason(function: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"(?s){text}"):
        atoll.program(function).lower(vector())
