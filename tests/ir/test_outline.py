"""Tests of outlines of IFRT IR programs, placed on a client's devices."""

from __future__ import annotations

import pytest

from atoll.errors import StatusError
from atoll.ir.outline import Fragment, Outline
from atoll.ir.program import Call, Program, Transfer
from atoll.ir.types import ArraySpec, Sharding


def spec(*devices: int) -> ArraySpec:
    return ArraySpec("float32", (4,), Sharding(devices))


OUTLINE = Outline(
    Program(
        "p", (spec(0, 1),), (Call(0, (0,), (spec(0, 1),), (0, 1)), Transfer((1,), (spec(2, 3),), reshard=True)), (2,)
    ),
    (Fragment("f", "a", (0, 1)),),
    (0,),
)


def test_logical_devices_become_the_clients() -> None:
    placed = OUTLINE.on((7, 5, 3, 1))
    call, transfer = placed.program.nodes
    assert isinstance(call, Call)
    assert (call.devices, call.outputs, transfer.outputs) == ((7, 5), (spec(7, 5),), (spec(3, 1),))
    assert (placed.program.arguments, placed.fragments) == ((spec(7, 5),), (Fragment("f", "a", (7, 5)),))
    assert (placed.program.results, placed.donated) == ((2,), (0,))


def test_a_fragment_has_the_key_of_its_compile_options() -> None:
    assert OUTLINE.fragments[0].key == "f_mesh_a"


@pytest.mark.parametrize(("outline", "text"), [
    (OUTLINE, "the program uses 4 devices, but the compile options have 3"),
    (Outline(Program("p", (spec(-1),), (), ()), ()), "the logical device -1"),
])  # fmt: skip
def test_devices_that_the_client_has_not_named_are_refused(outline: Outline, text: str) -> None:
    with pytest.raises(StatusError, match=text):
        outline.on((0, 1, 2))
