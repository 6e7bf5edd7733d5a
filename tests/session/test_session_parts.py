"""A program is sent in parts that are bounded by the number of their nodes and by their bytes."""

from __future__ import annotations

import msgspec

from atoll.controller_process.shell import MAX_NODES_FRAME
from atoll.ir.program import Call, Program
from atoll.protocol import messages as m
from atoll.session.split_programs import in_parts
from tests.controller.play import chain_of, on


def test_a_part_of_a_program_with_large_nodes_has_few_of_them():
    outputs = (on(0),) * 2000
    nodes = tuple(Call(1, (0,), outputs, (0,)) for _ in range(40))
    whole = Program("large", (on(0),), nodes, (1,))
    parts = list(in_parts(5, whole))
    assert [type(each) for each in parts] == [m.ProgramPart] * (len(parts) - 1) + [m.RegisterProgram]
    assert max(len(msgspec.msgpack.encode(each)) for each in parts) < m.MAX_PART_BYTES + 1000 < MAX_NODES_FRAME
    assert sum((each.definition.nodes for each in parts), ()) == nodes
    assert len(parts) < 30


def test_a_program_with_small_nodes_is_sent_by_their_number():
    sizes = [len(each.definition.nodes) for each in in_parts(5, chain_of(600))]
    assert sizes == [256, 256, 88]


def test_a_node_that_is_too_large_is_a_part_of_its_own():
    nodes = tuple(Call(1, (0,), (on(0),) * 20_000, (0,)) for _ in range(3))
    assert [len(each.definition.nodes) for each in in_parts(5, Program("f", (on(0),), nodes, (1,)))] == [1, 1, 1]
