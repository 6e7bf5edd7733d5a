"""Tests of what plans say about their steps."""

from __future__ import annotations

import typing

import msgspec
import pytest

from atoll.ir import plan as p

STEPS = typing.get_args(p.Step)
# Fields that hold values that a step reads.
_READ = ("input", "inputs", "arguments")


def step_of(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Return a step of this kind that reads value 7."""
    fields = {name: () for name in kind.__struct_fields__}
    examples = {"input": 7, "inputs": (7,), "arguments": ((0, 7),), "takes": (p.Take(0, 0),), "donate": False}
    return kind(**fields | {name: value for name, value in examples.items() if name in fields})


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.__name__)
def test_a_step_uses_the_values_that_it_reads(kind: type[msgspec.Struct]) -> None:
    reads = any(name in kind.__struct_fields__ for name in _READ)
    assert p.uses(step_of(kind)) == ((7,) if reads else ())  # type: ignore[arg-type]
