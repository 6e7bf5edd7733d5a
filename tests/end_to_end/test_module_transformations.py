"""Tests of HLO module transformations that a script has registered with JAX, which XLA calls during compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import hlo
from jax.extend import xla

from tests.end_to_end.remote_python import RemoteError, RemotePython


@contextmanager
def registered(transform: Callable[[bytes], bytes | None], **options: Any) -> Iterator[None]:
    xla.register_hlo_module_transformation(transform, name="mine", **options)
    try:
        yield
    finally:
        assert xla.clear_hlo_module_transformation("mine") == (not options)


def cosines(module: bytes) -> bytes | None:
    """Replace sines by cosines."""
    parsed = hlo.HloModule.from_serialized_hlo_module_proto(module)
    changed = False
    for computation in parsed.computations():
        for each in computation.instructions():
            if each.opcode == hlo.HloOpcode.kSin:
                cosine = computation.create_unary_instruction(hlo.HloOpcode.kCos, each.operands()[0])
                computation.replace_instruction(each, cosine)
                changed = True
    return parsed.as_serialized_hlo_module_proto() if changed else None


def sine_of_zero() -> float:
    return float(jax.jit(lambda x: jnp.sin(x))(jnp.float32(0)))


def sines() -> list[float]:
    results = []
    with registered(cosines):
        results.append(sine_of_zero())
    refusal = jax.__version_info__ >= (0, 11)  # JAX then rejects platforms without a plug-in
    with pytest.raises(jax.errors.JaxRuntimeError) if refusal else registered(cosines, platforms="tpu"):
        results.append(sine_of_zero())
        if refusal:
            xla.register_hlo_module_transformation(cosines, name="mine", platforms="tpu")
    return [*results, sine_of_zero()]


def test_a_transformation_is_called_for_programs_of_its_platform_until_it_is_cleared(
    atoll_python: RemotePython,
) -> None:
    assert atoll_python.call(sines) == [1.0, 0.0, 0.0]


def sine_by(transform: Callable[[bytes], bytes | None]) -> float:
    with registered(transform):
        return sine_of_zero()


def raises(module: bytes) -> bytes:
    raise ValueError("no such module")


def garbage(module: bytes) -> bytes:
    return b"garbage"


def another_type(module: bytes) -> bytes:
    def of_two(x: Any) -> Any:
        return jnp.stack([x, x])

    lowered = jax.jit(of_two).lower(jax.ShapeDtypeStruct((), jnp.float32))
    return bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())


@pytest.mark.parametrize(
    ("transform", "error"),
    [(raises, "no such module"), (garbage, "module"), (another_type, "has changed the type of a module")],
)
def test_one_that_fails_fails_the_compilation_and_nothing_else(
    atoll_python: RemotePython, transform: Callable[[bytes], bytes | None], error: str
) -> None:
    with pytest.raises(RemoteError, match=error):
        atoll_python.call(sine_by, transform)
    assert atoll_python.call(sine_of_zero) == 0.0
