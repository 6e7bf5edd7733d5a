"""Programs that call functions which are still being compiled: they are lowered once workers have reported these.

Before that, nobody but the client could say what memory they take. Each refers to the functions that it calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.ir.program import Program
from atoll.scheduling.session import Session

MAX_UNCOMPILED = 64  # programs of a session; libraries register a program once its functions are compiled


@dataclass(frozen=True, eq=False, slots=True)
class UncompiledProgram:
    """A program of a session. `functions` are those that it calls, by their numbers in the session."""

    session: Session
    number: int
    definition: Program
    functions: Mapping[int, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.functions.values()))


class UncompiledPrograms:
    """By session and number, with the name of one function that each of them waits for."""

    def __init__(self) -> None:
        self._programs: dict[int, dict[int, tuple[str, UncompiledProgram]]] = {}
        self._by_function: dict[str, dict[tuple[int, int], None]] = {}

    def add(self, program: UncompiledProgram, function: str) -> None:
        """The program waits for this function."""
        session = program.session.number
        self._programs.setdefault(session, {})[program.number] = function, program
        self._by_function.setdefault(function, {})[session, program.number] = None

    def is_full(self, session: int) -> bool:
        """Whether as many programs of the session wait as may."""
        return len(self._programs.get(session, ())) >= MAX_UNCOMPILED

    def take(self, session: int, number: int) -> UncompiledProgram | None:
        """Return the program, which waits no more; None if it does not wait."""
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
        """Return the programs that wait for the function. They wait no more."""
        found = [self.take(*key) for key in list(self._by_function.get(function, ()))]
        return [each for each in found if each is not None]

    def take_of(self, session: int, function: str | None = None) -> list[UncompiledProgram]:
        """Return the programs of a session that call the function, or all of them. They wait no more."""
        own = self._programs.get(session, {})
        numbers = [
            number for number, (_, program) in own.items() if function is None or function in program.functions.values()
        ]
        found = [self.take(session, number) for number in numbers]
        return [each for each in found if each is not None]
