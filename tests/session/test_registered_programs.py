"""The program cache releases the least recently used program. A large program is sent in bounded parts."""

from __future__ import annotations

import msgspec

from atoll.controller_process.frame_limits import MAX_NODES_FRAME
from atoll.ir.program import Call, Program
from atoll.protocol import messages as m
from atoll.session.registered_programs import SessionProgramCache, in_parts
from tests.controller.play import chain_of, on


class Registry:
    def __init__(self, limit: int) -> None:
        self.registered: list[str] = []
        self.released: list[int] = []
        self.cache = SessionProgramCache(self._register, self.released.append, limit)

    def _register(self, program: Program) -> int:
        self.registered.append(program.name)
        return len(self.registered) - 1

    def number(self, name: str) -> int:
        return self.cache.number(name, lambda: Program(name, (), (), ()))


def test_a_program_is_registered_once():
    registry = Registry(limit=8)
    assert [registry.number(name) for name in "abab"] == [0, 1, 0, 1]
    assert registry.registered == ["a", "b"]


def test_the_program_that_was_not_used_for_longest_is_released():
    registry = Registry(limit=2)
    for name in "abac":  # b is the oldest when c comes
        registry.number(name)
    assert (registry.registered, registry.released) == (["a", "b", "c"], [1])
    assert len(registry.cache) == 2


def test_a_released_program_is_registered_anew():
    registry = Registry(limit=1)
    assert [registry.number(name) for name in "aba"] == [0, 1, 2]
    assert registry.released == [0, 1]


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
