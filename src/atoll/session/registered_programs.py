"""Registered programs that a session may need again: transfers, views, copies to the host.

Invariant: at most `limit` of them are registered; the one that was not used for longest is released first. Programs of
executables are not here: they live as long as their executable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from atoll.ir.program import Program

MAX_PROGRAMS = 4096


class ProgramCache:
    """Programs by what makes two of them equal. `register` numbers a program; `release` takes the number back."""

    def __init__(
        self, register: Callable[[Program], int], release: Callable[[int], None], limit: int = MAX_PROGRAMS
    ) -> None:
        self._register = register
        self._release = release
        self._limit = limit
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, key: Hashable, build: Callable[[], Program]) -> int:
        """The number of the program with this key; `build` is called only for one that is not registered."""
        number = self._numbers.get(key)
        if number is not None:
            self._numbers.move_to_end(key)
            return number
        number = self._numbers[key] = self._register(build())
        while len(self._numbers) > self._limit:
            _, oldest = self._numbers.popitem(last=False)
            self._release(oldest)
        return number
