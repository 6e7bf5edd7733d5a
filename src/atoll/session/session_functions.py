"""The compiled functions of a session: their sources, and how many executables use each.

A source is kept for as long as its function lives: a host that restarts compiles it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence


class SessionFunctions:
    """Functions by number."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._users: Counter[int] = Counter()

    def add(self, function: int, source: bytes, devices: Sequence[int]) -> None:
        self._sources[function] = (source, tuple(devices))

    def remove(self, function: int) -> None:
        self._sources.pop(function, None)

    def source(self, function: int) -> bytes | None:
        """The source; None for a function that was released."""
        found = self._sources.get(function)
        return None if found is None else found[0]

    def devices(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(function, its devices), for all functions as of now."""
        yield from [(function, devices) for function, (_, devices) in self._sources.items()]

    def retain(self, functions: Iterable[int]) -> None:
        """One more executable uses these functions."""
        self._users.update(functions)

    def drop(self, functions: Iterable[int]) -> list[int]:
        """One executable less uses these functions. Returns those that none uses any more."""
        unused = []
        for function in functions:
            self._users[function] -= 1
            if not self._users[function]:
                del self._users[function]
                unused.append(function)
        return unused
