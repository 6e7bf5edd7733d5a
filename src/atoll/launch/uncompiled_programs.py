"""Programs that wait until the functions that they call are compiled."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from atoll.ir.program import Program
from atoll.state.session import Session

# Limit per session. Client libraries register a program only after its functions are compiled.
MAX_UNCOMPILED = 64


class UncompiledProgram(msgspec.Struct, frozen=True, eq=False):
    """A program of a session, with the names of the functions that it calls, by their numbers in the session.

    It holds a reference to each function.
    """

    session: Session
    number: int
    definition: Program
    functions: Mapping[int, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.functions.values()))


class UncompiledPrograms:
    """The programs that call functions which are still being compiled, with one such function for each.

    They are lowered when workers have reported their functions. Before that, their memory needs are known only from the
    client, which is not trusted.
    """

    def __init__(self) -> None:
        self._programs: dict[int, dict[int, tuple[str, UncompiledProgram]]] = {}
        self._by_function: dict[str, dict[tuple[int, int], None]] = {}

    def add(self, program: UncompiledProgram, function: str) -> None:
        """Have the program wait for this function."""
        session = program.session.number
        self._programs.setdefault(session, {})[program.number] = function, program
        self._by_function.setdefault(function, {})[session, program.number] = None

    def is_full(self, session: int) -> bool:
        """Return whether the limit of waiting programs of the session is reached."""
        return len(self._programs.get(session, ())) >= MAX_UNCOMPILED

    def take(self, session: int, number: int) -> UncompiledProgram | None:
        """Remove and return a program that waits, or return None."""
        own = self._programs.get(session, {})
        if number not in own:
            return None
        function, program = own.pop(number)
        if not own:
            del self._programs[session]
        same = self._by_function[function]
        del same[session, number]
        if not same:
            del self._by_function[function]
        return program

    def take_all(self, function: str) -> list[UncompiledProgram]:
        """Remove and return the programs that wait for the function."""
        found = [self.take(*key) for key in list(self._by_function.get(function, ()))]
        return [each for each in found if each is not None]

    def take_of(self, session: int, function: str | None = None) -> list[UncompiledProgram]:
        """Remove and return the waiting programs of a session that call the function, or all of them."""
        own = self._programs.get(session, {})
        numbers = [
            number for number, (_, program) in own.items() if function is None or function in program.functions.values()
        ]
        found = [self.take(session, number) for number in numbers]
        return [each for each in found if each is not None]
