"""Registered programs: at most so many, the oldest released first."""

from __future__ import annotations

from atoll.ir.program import Program
from atoll.session.registered_programs import ProgramCache


class Registry:
    def __init__(self, limit: int) -> None:
        self.registered: list[str] = []
        self.released: list[int] = []
        self.cache = ProgramCache(self._register, self.released.append, limit)

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
