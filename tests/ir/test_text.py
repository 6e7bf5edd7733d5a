"""Tests of the text of programs: it is what users read, can be parsed, and stays short."""

from __future__ import annotations

import pytest

from atoll.cluster.locations import DeviceLocation, Placement
from atoll.ir.lowering import lower
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Mapping,
    Program,
    Rearrange,
    Transfer,
)
from atoll.ir.text import render, render_lowered
from atoll.ir.types import ArraySpec, Even, Opaque, Replicated, Sharding, Tiled, Uneven
from tests.ir.program_text import parse


def two_steps(shards: int) -> Program:
    """Return a call on some devices, whose result is transferred to the same number of others for another call."""

    def rows(first: int) -> ArraySpec:
        devices = tuple(range(first, first + shards))
        return ArraySpec("float32", (8192, 128), Sharding(devices, Tiled((shards, 1), tuple(range(shards)))))

    here, there = rows(0), rows(shards)
    nodes = (
        Call(0, (0, 1), (here,), here.sharding.devices, donated=(1,)),
        Transfer((2,), (there,)),
        Call(1, (3,), (there,), there.sharding.devices),
    )
    return Program("train", (here, here), nodes, (4,))


def two_islands(shards: int) -> Placement:
    """Return hosts with up to eight devices."""
    here = min(shards, 8)
    return {i: DeviceLocation(i // shards, i // here, i % here) for i in range(2 * shards)}


HERE = "!atoll.array<float32[8192, 128], devices = [0:8], tiled = [8, 1]>"
THERE = "!atoll.array<float32[8192, 128], devices = [8:16], tiled = [8, 1]>"


def test_a_program_reads_as_what_was_asked_for():
    assert render(two_steps(8), ["step", "loss"]) == (
        f"""\
builtin.module {{
  atoll.program @train(%0: {HERE}, %1: {HERE}) {{
    %2 = atoll.call @step(%0, %1) on [0:8] donate [1] : {HERE}
    %3 = atoll.transfer %2 : {THERE}
    %4 = atoll.call @loss(%3) on [8:16] : {THERE}
    atoll.return (%4)
  }}
}}
"""
    )


def test_functions_of_one_name_are_distinguished():
    text = render(two_steps(1), ["<lambda>", "<lambda>"])
    assert '@"<lambda>"(%0, %1)' in text
    assert '@"<lambda>_1"(%3)' in text


def test_the_lowered_form_reads_as_gangs_and_the_hosts_plans():
    assert render_lowered(two_steps(16), two_islands(16), ["step", "loss"]) == (
        """\
program @train: 2 arguments, returns (%4), 0 feeds
gang 0: node 0 on island 0, hosts [0:2], runs @step together, makes (%2)
gang 1: node 1 on island 0, hosts [0:2], drops (%2)
gang 2: node 1 on island 1, hosts [2:4], makes (%3)
gang 3: node 2 on island 1, hosts [2:4], runs @loss together, makes (%4), drops (%3)
plan of hosts [0]: takes (%0, %1)
  gang 0, drops (%0, %1)
    execute @step(%0, %1), outputs from %2 on, donates [1]
  gang 1, drops (%2)
    send of %2 shards """
        + ", ".join(f"{i} [0:512, 0:128] to host 2 as host feed {i}" for i in range(8))
        + """
plan of hosts [1]: takes (%0, %1)
  gang 0, drops (%0, %1)
    execute @step(%0, %1), outputs from %2 on, donates [1]
  gang 1, drops (%2)
    send of %2 shards """
        + ", ".join(f"{i} [0:512, 0:128] to host 3 as host feed {8 + i}" for i in range(8))
        + """
plan of hosts [2]: takes ()
  gang 2
    %3 = receive on devices [0:8], host feeds [0:8]
  gang 3, returns (%4), drops (%3, %4)
    execute @loss(%3), outputs from %4 on
plan of hosts [3]: takes ()
  gang 2
    %3 = receive on devices [0:8], host feeds [8:16]
  gang 3, returns (%4), drops (%3, %4)
    execute @loss(%3), outputs from %4 on
"""
    )


@pytest.mark.parametrize("shards", [1, 8, 2048])
def test_text_and_steps_do_not_grow_with_the_number_of_shards(shards):
    program = two_steps(shards)
    assert len(render(program, ["step", "loss"])) < 600
    plans = lower(program, two_islands(shards), {0: "step", 1: "loss"}).plans
    assert {len(segment.steps) for plan in plans.values() for segment in plan.segments} == {1}


ONE = ArraySpec("float32", (2,), Sharding((0,)))
SPECS = [
    ONE,
    ArraySpec("bfloat16", (), Sharding((0,)), ()),
    ArraySpec("int8", (4,), Sharding((7, 6, 5, 4), Replicated(), "pinned_host"), (0,)),
    ArraySpec("float8_e4m3b11fnuz", (4, 4), Sharding((0, 2, 4, 6), Tiled((2, 1, 2), (0, 2, 1, 3))), (0, 1)),
    ArraySpec("int4", (8,), Sharding((0, 1), Even((3,)))),
    ArraySpec("int4", (9,), Sharding((0, 1, 2), Uneven(((2,), (2,), (5,))))),
    ArraySpec("token", (0,), Sharding((1, 3), Opaque())),
    ArraySpec("int8", (4,), Sharding((5, 5, 2), Replicated(), 'a "kind"')),
    ArraySpec("int8", (4,), Sharding(())),
]


def every_node() -> Program:
    nodes = (
        HostToDevice(
            (
                HostBuffer(0, (2,), (-4,), (0,)),
                HostBuffer(1, (2,), (-4,), (1,)),
                HostBuffer(3, (2,), None, (2, 3)),
            ),
            (ArraySpec("float32", (8,), Sharding((0, 1, 2, 3), Even((2,)))),),
        ),
        HostToDevice((HostBuffer(2, (2,), None, None),), (ONE,)),
        Call(3, (0, 1), (ONE,), (0, 2, 4), (0,), (1,), True),
        Call(4, (), (), (0,), stream=-5),
        Transfer((0, 10), (ArraySpec("float32", (2,), Sharding((1,))), ONE), True, True),
        Rearrange((9, 10), (ONE,), (Mapping(0, 0, (0, 4, 4), (0, 1, 1)),), True, True),
        DeviceToHost((0,), 4, (-4,)),
        DeviceToHost((0,), 5, None),
        DeviceToHost((0, 1), 3, None),
        DeviceToHost((0, 0, 1), 3, None, (), (0, 1, 0)),
        HostToDevice(
            (
                HostBuffer(0, (2,), None, (0,), 0),
                HostBuffer(1, (2,), None, (1,), 0),
                HostBuffer(2, (2,), None, None, 1),
            ),
            (ArraySpec("float32", (4,), Sharding((0, 1), Even((2,)))), ONE),
        ),
    )
    return Program("every node", tuple(SPECS), nodes, (12, 13, 0, 12), 6)


def test_every_node_and_array_survives_its_text():
    functions = ["a", "b", "c", "<lambda>", "g"]
    assert parse(render(every_node(), functions), functions) == every_node()
