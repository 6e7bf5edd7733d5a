"""The compiled functions of a session, as its proxy knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence


class SessionFunctions:
    """The compiled functions of a session: the source of each, and how many executables use it.

    A source is kept as long as its function, so that restarted hosts can compile it again.
    """

    def __init__(self) -> None:
        self._sources: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._users: Counter[int] = Counter()

    def add(self, function: int, source: bytes, devices: Sequence[int]) -> None:
        self._sources[function] = (source, tuple(devices))

    def remove(self, function: int) -> None:
        self._sources.pop(function, None)

    def source(self, function: int) -> bytes | None:
        """Return the source, or None for a function that was released."""
        found = self._sources.get(function)
        return None if found is None else found[0]

    def devices(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield each function with its devices."""
        yield from [(function, devices) for function, (_, devices) in self._sources.items()]

    def retain(self, functions: Iterable[int]) -> None:
        self._users.update(functions)

    def drop(self, functions: Iterable[int]) -> list[int]:
        """Count one user less of each function. Return the functions without users."""
        unused = []
        for function in functions:
            self._users[function] -= 1
            if not self._users[function]:
                del self._users[function]
                unused.append(function)
        return unused
