from __future__ import annotations

import msgspec
import pytest

from atoll.errors import Code, StatusError
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Mapping,
    Program,
    Rearrange,
    Transfer,
    check,
    output_count,
    single,
)
from atoll.ir.types import ArraySpec, Even, Opaque, Replicated, Sharding, Tiled, Uneven

ONE = ArraySpec("float32", (2,), Sharding((0,)))
TWO = ArraySpec("float32", (2,), Sharding((1,), memory_kind="pinned_host"))


@pytest.mark.parametrize(
    ("node", "count"),
    [
        (Call(1, (0,), (ONE, ONE), (0,)), 2),
        (Call(1, (0,), (ONE, ONE), (0,), completion=True), 3),
        (Call(1, (), (), (0,)), 0),
        (HostToDevice((HostBuffer(0, (2,), None, None),), (ONE,)), 1),
        (DeviceToHost((0,), 0, None), 1),  # its completion
        (Transfer((0,), (TWO,)), 1),
        (Rearrange((0,), (ONE, ONE), ()), 2),
    ],
)
def test_each_node_defines_its_outputs_and_its_completion(node, count):
    assert output_count(node) == count


def test_a_program_of_one_node_returns_all_that_the_node_gives():
    program = single("f", (ONE, ONE), Call(1, (0, 1), (ONE, ONE), (0,), completion=True))
    assert program.results == (2, 3, 4)
    assert program.feeds == 0
    check(program)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (Program("f", (ONE,), (Transfer((1,), (TWO,)),), ()), "uses value 1 of 1 values"),
        (Program("f", (ONE,), (Transfer((-1,), (TWO,)),), ()), "uses value -1"),
        (
            Program("f", (ONE,), (Transfer((0,), (TWO,)), Transfer((2,), (ONE,))), ()),
            "uses value 2 of 2 values",
        ),
        (Program("f", (ONE,), (), (1,)), "returns value 1"),
        (Program("f", (ONE,), (), (-1,)), "returns value -1"),
        (Program("f", (ONE,), (DeviceToHost((0,), 1, None),), (), 1), "uses feed 1 of 1"),
        (
            Program("f", (), (HostToDevice((HostBuffer(-1, (2,), None, None),), (ONE,)),), (), 1),
            "uses feed -1",
        ),
        (
            Program("f", (ONE,), (Rearrange((0,), (ONE,), (Mapping(1, 0, (0, 1, 1), (0, 1, 1)),)),), ()),
            "input or output that does not exist",
        ),
        (
            Program("f", (ONE,), (Rearrange((0,), (ONE,), (Mapping(0, 1, (0, 1, 1), (0, 1, 1)),)),), ()),
            "input or output that does not exist",
        ),
        (
            Program("f", (ONE,), (Rearrange((0,), (ONE,), (Mapping(0, 0, (0, 1, 0), (0, 1, 1)),)),), ()),
            "step below 1",
        ),
        (Program("f", (ONE,), (Transfer((0,), (TWO, TWO)),), ()), "1 input to 2 outputs"),
        (Program("f", (ONE,), (Call(1, (0,), (), (0,), donated=(1,)),), ()), "input 1 of a call with 1 input"),
        (Program("f", (ONE,), (Call(1, (0,), (), (0,), preserved=(-1,)),), ()), "input -1 of a call with 1 input"),
    ],
)
def test_a_program_that_does_not_hang_together_is_refused_by_name(program, text):
    with pytest.raises(StatusError, match=text) as caught:
        check(program)
    assert caught.value.status.code == Code.INVALID_ARGUMENT
    assert "'f'" in str(caught.value)


def test_programs_of_every_node_and_sharding_survive_the_wire():
    shardings = (
        Sharding((0,)),
        Sharding((0, 1), Replicated(), "pinned_host"),
        Sharding((0, 1), Tiled((2, 1), (1, 0))),
        Sharding((0, 1), Even((1,))),
        Sharding((0, 1), Uneven(((1,), (3,)))),
        Sharding((0, 1), Opaque()),
    )
    arguments = tuple(ArraySpec("int8", (4,), sharding, (0,)) for sharding in shardings)
    program = Program(
        "all",
        arguments,
        (
            HostToDevice((HostBuffer(0, (2,), (4,), (0, 1)), HostBuffer(1, (2,), None, None)), (ONE,)),
            Call(3, (0, 1), (ONE,), (0, 1), (0,), (1,), True),
            Transfer((2,), (TWO,), True, True),
            Rearrange((0,), (ONE,), (Mapping(0, 0, (0, 4, 2), (0, 2, 1)),), True, True),
            DeviceToHost((3,), 2, (-4,), (), (1,)),
        ),
        (6, 7),
        3,
    )
    encoded = msgspec.msgpack.encode(program)
    assert msgspec.msgpack.decode(encoded, type=Program) == program
    assert hash(msgspec.msgpack.decode(encoded, type=Program)) == hash(program)
