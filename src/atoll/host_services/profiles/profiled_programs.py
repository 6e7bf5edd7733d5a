"""The programs of a host, by name, and the sessions that have compiled them: what a session may see of others."""

from __future__ import annotations

import threading
from collections import OrderedDict

from atoll.host_services.profiles.xspace import Others

# Of how many functions that are gone the programs' names are known.
_PAST_NAMES = 4096


class Programs:
    """By the cluster's names for functions. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, tuple[str, set[int]]] = {}
        self._past: OrderedDict[str, None] = OrderedDict()  # names of programs that were here

    def compiled(self, function: str, program: str, session: int) -> None:
        """A session has compiled a program; maybe others had before it."""
        with self._lock:
            self._names.setdefault(function, (program, set()))[1].add(session)

    def dropped(self, function: str) -> None:
        with self._lock:
            program, _ = self._names.pop(function)
            self._past[program] = None
            while len(self._past) > _PAST_NAMES:
                self._past.popitem(last=False)

    def close(self, session: int) -> None:
        """The session has ended."""
        with self._lock:
            for _, sessions in self._names.values():
                sessions.discard(session)

    def others(self, session: int) -> Others:
        """Programs that are or were here, and that the session has not compiled itself."""
        own: set[str] = set()
        with self._lock:
            others = set(self._past)
            for program, sessions in self._names.values():
                (own if session in sessions else others).add(program)
        return Others(others - own, others & own)
