"""Tests of programs whose arrays are too large for XLA's compiler, which would end the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from atoll.devices.device import MayCrashError
from atoll.devices.xla import xla_compilation
from atoll.devices.xla.xla_compilation import check_sizes, check_values
from atoll.errors import Code, StatusError

HUGE = 1 << 44
ARGUMENT = jax.ShapeDtypeStruct((HUGE,), jnp.int8)


def check(function: Callable[..., Any], *arguments: Any, devices: int = 1) -> None:
    module = jax.jit(function).lower(*arguments).compiler_ir()
    with module.context:
        check_sizes(module, devices)


@pytest.mark.parametrize(
    ("function", "arguments", "nbytes"),
    [
        (lambda: jax.lax.iota("int8", HUGE), (), HUGE),
        (lambda: jax.lax.iota("complex64", HUGE), (), 8 * HUGE),
        (lambda: (jnp.float32(1), jax.lax.iota("int32", HUGE).reshape(4, -1)), (), 4 * HUGE),
        (lambda x: jnp.sin(x.astype("float32")), (ARGUMENT,), 4 * HUGE),
        (lambda x: x.sum(), (ARGUMENT,), HUGE),
    ],
)
def test_arrays_that_fit_on_no_machine_are_refused_as_if_they_were_allocated(
    function: Callable[..., Any], arguments: tuple[Any, ...], nbytes: int
) -> None:
    with pytest.raises(StatusError) as refused:
        check(function, *arguments)
    assert refused.value.status.code == Code.RESOURCE_EXHAUSTED
    assert refused.value.status.message == f"Out of memory allocating {nbytes} bytes."


def test_what_the_compiler_takes_or_the_machine_can_have_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda: jnp.zeros((HUGE,), "int8"))  # fails when it is allocated
    check(lambda: jax.lax.iota("int8", HUGE), devices=1 << 10)
    check(lambda: jax.lax.iota("int8", 1 << 34))
    check(lambda: jnp.float32(1))
    monkeypatch.setattr(xla_compilation, "machine_memory", lambda: 2 * HUGE)
    check(lambda: jax.lax.iota("int8", HUGE))


@pytest.mark.parametrize(
    ("function", "nbytes"),
    [
        (lambda: jax.lax.iota("int32", HUGE).max(), 4 * HUGE),
        (lambda: jax.lax.iota("complex64", HUGE)[3], 8 * HUGE),
        (lambda: jax.lax.cond(jnp.sin(1.0) > 0, lambda: jax.lax.iota("int8", HUGE).max(), lambda: jnp.int8(1)), HUGE),
        (lambda: jax.lax.fori_loop(0, 3, lambda i, c: c + jax.jit(lambda: jax.lax.iota("int8", HUGE)[i])(), 0), HUGE),
    ],
    ids=["sum", "element", "branch", "loop"],
)
def test_programs_with_values_that_fit_on_no_machine_may_end_the_process(
    function: Callable[..., Any], nbytes: int
) -> None:
    module = jax.jit(function).lower().compiler_ir()
    with module.context:
        check_sizes(module, 1)
        with pytest.raises(MayCrashError) as refused:
            check_values(module, 1)
        check_values(module, 1 << 10)
    assert refused.value.status.code == Code.RESOURCE_EXHAUSTED
    assert refused.value.status.message == f"Out of memory allocating {nbytes} bytes."


def test_programs_with_values_that_xla_takes_are_compiled_in_the_process() -> None:
    module = jax.jit(lambda x: jax.lax.iota("int8", 1 << 34).sum() + jnp.sin(x)).lower(1.0).compiler_ir()
    with module.context:
        check_values(module, 1)
