"""The compiled functions of a session, as its proxy knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence


class SessionFunctions:
    """The compiled functions of a session: the source of each, and how many executables use it.

    A source is kept as long as one of its functions, so that restarted hosts can compile it again. It contains the
    constants of the function, which can be large. Functions on different devices share an equal source.
    """

    def __init__(self) -> None:
        self._functions: dict[int, tuple[str, tuple[int, ...]]] = {}  # the hash of the source, and the devices
        self._sources: dict[str, bytes] = {}
        self._sharers: Counter[str] = Counter()
        self._users: Counter[int] = Counter()

    def add(self, function: int, source: bytes, content: str, devices: Sequence[int]) -> bytes:
        """Add a function whose source has the hash `content`. Return the source, or the equal one that is kept."""
        self._functions[function] = (content, tuple(devices))
        self._sharers[content] += 1
        return self._sources.setdefault(content, source)

    def remove(self, function: int) -> None:
        content, _ = self._functions.pop(function, ("", ()))
        if content:
            self._sharers[content] -= 1
            if not self._sharers[content]:
                del self._sharers[content], self._sources[content]

    def source(self, function: int) -> bytes | None:
        """Return the source, or None for a function that was released."""
        found = self._functions.get(function)
        return None if found is None else self._sources[found[0]]

    def devices(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield each function with its devices, the newest first: a script is more likely to call it again."""
        yield from [(function, devices) for function, (_, devices) in reversed(self._functions.items())]

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
